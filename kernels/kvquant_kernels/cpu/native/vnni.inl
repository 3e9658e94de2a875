// Integer products of 8-, 4- and 2-bit codes with AVX512-VNNI: queries as 15-bit, weights as 16-bit integers, each split
// into two bytes. Rounding multiplies codes with their middle taken out, since the middle is subtracted with the sums of
// the rounded numbers. Included by attend.inl for the variant that has the instructions.

constexpr float kQueryLevels = 16256.f;   // 127 * 128: the largest hi * 128 + lo of two signed bytes
constexpr float kWeightLevels = 65535.f;  // hi * 256 + lo of two unsigned bytes

// Functions whose registers would be spilled if they were part of a larger one.
#define KVQ_NOINLINE __attribute__((noinline))

// sum + the products of four unsigned with four signed bytes in every lane. As assembly, because GCC copies the sums of
// the intrinsic from register to register.
inline __m512i add_products_of_bytes(__m512i sum, __m512i is_unsigned, __m512i is_signed) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(is_unsigned), "v"(is_signed));
  return sum;
}

inline __m512i broadcast_four_bytes(const void* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}

template <int BITS>
inline __m512i field_of(__m512i words, int f) {
  if (BITS == 8) return words;
  const __m512i shifted = f ? _mm512_srli_epi16(words, BITS * f) : words;
  return _mm512_and_si512(shifted, _mm512_set1_epi8((1 << BITS) - 1));
}

inline void store_bytes(void* p, __m512i x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x)); }

// Memory to fetch on the way: for the first `rows` rows, kBytesPerNumber for every number, one row after the other.
struct Lines {
  const uint8_t* first;
  int rows;
};
constexpr int kBytesPerNumber = 8;

// Rows of a query or of weights, `stride` apart, and the scales and zero points that are folded into them. n counts up to a
// multiple of 16; what is beyond n must be zero.
struct Unfolded {
  const float* x;
  int stride;
  const float *scale, *zero;
  int n;
  Lines lines;

  __m512 row(int r, int i) const { return _mm512_loadu_ps(x + r * stride + i); }
  // For pass 0 or 1 over the numbers.
  KVQ_INLINE void fetch(int pass, int r, int i) const {
    if (r < lines.rows) prefetch(lines.first + kBytesPerNumber * (r * n + (pass * n + i) / 2));
  }
};

// What rounding makes of a row: x * scale as integers of two bytes that count `step`, and what is to be added to step times
// their products with codes: x . zero less the integers' products with the middle of the codes.
struct Rounded {
  uint8_t *high, *low;
  float step, offset;
};

// The largest |x * scale| of each row, NaN left aside, and x . zero lane by lane, or NaN if a scale is.
template <int ROWS>
inline void measure(const Unfolded& f, float* largest, __m512* product) {
  __m512 top[ROWS], nothing = _mm512_setzero_ps();
  for (int r = 0; r < ROWS; r++) top[r] = product[r] = _mm512_setzero_ps();
  for (int i = 0; i < f.n; i += 16) {
    const __m512 scale = _mm512_loadu_ps(f.scale + i), zero = _mm512_loadu_ps(f.zero + i);
    for (int r = 0; r < ROWS; r++) {
      top[r] = _mm512_max_ps(_mm512_abs_ps(_mm512_mul_ps(f.row(r, i), scale)), top[r]);
      product[r] = _mm512_fmadd_ps(f.row(r, i), zero, product[r]);
      f.fetch(0, r, i);
    }
    nothing = _mm512_fmadd_ps(scale, _mm512_setzero_ps(), nothing);
  }
  for (int r = 0; r < ROWS; r++) {
    largest[r] = std::max(_mm512_reduce_max_ps(top[r]), 1e-30f);
    product[r] = _mm512_add_ps(product[r], nothing);
  }
}

// Folds and rounds: to high * 128 + low of signed bytes if IS_SIGNED, else to high * 256 + low of unsigned ones.
template <bool IS_SIGNED, int ROWS>
inline void fold_and_round(const Unfolded& f, float middle, Rounded* rows) {
  constexpr float kLevels = IS_SIGNED ? kQueryLevels : kWeightLevels;
  constexpr int kLowBits = IS_SIGNED ? 7 : 8;
  float largest[ROWS];
  __m512 product[ROWS];
  __m512i total[ROWS];
  measure<ROWS>(f, largest, product);
  for (int r = 0; r < ROWS; r++) total[r] = _mm512_setzero_si512();
  for (int i = 0; i < f.n; i += 16)
    for (int r = 0; r < ROWS; r++) {
      const __m512 folded = _mm512_mul_ps(f.row(r, i), _mm512_loadu_ps(f.scale + i));
      const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(folded, _mm512_set1_ps(kLevels / largest[r])));
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(rounded, _mm512_set1_epi32(IS_SIGNED ? 64 : 0)), kLowBits);
      store_bytes(rows[r].high + i, high);
      store_bytes(rows[r].low + i, IS_SIGNED ? _mm512_sub_epi32(rounded, _mm512_slli_epi32(high, kLowBits)) : rounded);
      total[r] = _mm512_add_epi32(total[r], rounded);
      f.fetch(1, r, i);
    }
  for (int r = 0; r < ROWS; r++) {
    rows[r].step = largest[r] * (1.f / kLevels);
    const __m512 middles = _mm512_mul_ps(_mm512_cvtepi32_ps(total[r]), _mm512_set1_ps(middle * rows[r].step));
    rows[r].offset = _mm512_reduce_add_ps(_mm512_sub_ps(product[r], middles)) + largest[r] * 0.f;  // NaN if it is infinite
  }
}

// Rows that are computed together: as many as keep their sums in registers.
template <int BITS>
constexpr int kRowsAtOnce = BITS == 2 ? 2 : kGroupOfRows;

// Blocks of words that are read side by side, so that broadcasts are shared and sums do not wait for each other.
template <int BITS, int ROWS>
constexpr int kBlocksAtOnce = std::min(std::max(8 / (8 / BITS * ROWS), 1), 4);

// The sums of products with high bytes and with low ones.
template <int ROWS, int FIELDS>
struct Sums {
  __m512i high[ROWS][FIELDS], low[ROWS][FIELDS];

  Sums() {
    for (int r = 0; r < ROWS; r++)
      for (int f = 0; f < FIELDS; f++) high[r][f] = low[r][f] = _mm512_setzero_si512();
  }

  // With high bytes counting 2 ** SHIFT times as much.
  template <int SHIFT>
  __m512 total(int r, int f) const {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[r][f], SHIFT), low[r][f]));
  }
};

// scores[r][t] = step * (q . codes) + offset for the 16 * (8 / BITS) tokens of each of some blocks.
template <int BITS, int BLOCKS, int ROWS>
KVQ_NOINLINE void vnni_key_products(const uint8_t* words, const Rounded* q, int dim, float* scores, int stride, int64_t ahead) {
  constexpr int kFields = 8 / BITS;
  const int64_t block = 16 * dim;
  Sums<ROWS, BLOCKS * kFields> sums;
  for (int i = 0; i < dim / 4; i++, words += 64) {
    __m512i w[BLOCKS];
    for (int k = 0; k < BLOCKS; k++) {
      w[k] = _mm512_loadu_si512(words + k * block);
      prefetch(words + k * block + ahead);
    }
    for (int r = 0; r < ROWS; r++) {
      const __m512i h = broadcast_four_bytes(q[r].high + 4 * i), l = broadcast_four_bytes(q[r].low + 4 * i);
      for (int j = 0; j < BLOCKS * kFields; j++) {
        const __m512i codes = field_of<BITS>(w[j / kFields], j % kFields);
        sums.high[r][j] = add_products_of_bytes(sums.high[r][j], codes, h);
        sums.low[r][j] = add_products_of_bytes(sums.low[r][j], codes, l);
      }
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < BLOCKS * kFields; j++)
      _mm512_storeu_ps(scores + r * stride + 16 * j, _mm512_fmadd_ps(sums.template total<7>(r, j), _mm512_set1_ps(q[r].step), _mm512_set1_ps(q[r].offset)));
}

// Two bytes per token of some rows' folded weights, and what their products are scaled and shifted by: those of row r begin
// r strides further.
struct RoundedWeights {
  const uint8_t *high, *low;
  const float *step, *bias;
  int stride, bias_stride;
};

// sum[r][f * field_stride + 16 * k + lane] += step[r] * (weights . codes) + bias[r], for some columns k of `width` words, which
// is 16 if there are several; codes of 8 bits less 128. The two terms nearly cancel: they are added to each other first.
template <int BITS, int COLUMNS, int ROWS>
KVQ_NOINLINE void vnni_value_products(const uint8_t* words, int width, int tokens, RoundedWeights p, float* sum, int sum_stride,
                                      int field_stride, int64_t ahead) {
  constexpr int kFields = 8 / BITS;
  const int64_t column = 16 * tokens;
  Sums<ROWS, COLUMNS * kFields> sums;
  for (int i = 0; i < tokens / 4; i++, words += 4 * width) {
    __m512i w[COLUMNS];
    for (int k = 0; k < COLUMNS; k++) {
      w[k] = _mm512_loadu_si512(words + k * column);
      prefetch(words + k * column + ahead);
      if (BITS == 8) w[k] = _mm512_xor_si512(w[k], _mm512_set1_epi8((char)0x80));
    }
    for (int r = 0; r < ROWS; r++) {
      const __m512i h = broadcast_four_bytes(p.high + r * p.stride + 4 * i), l = broadcast_four_bytes(p.low + r * p.stride + 4 * i);
      for (int j = 0; j < COLUMNS * kFields; j++) {
        const __m512i codes = field_of<BITS>(w[j / kFields], j % kFields);
        sums.high[r][j] = add_products_of_bytes(sums.high[r][j], h, codes);
        sums.low[r][j] = add_products_of_bytes(sums.low[r][j], l, codes);
      }
    }
  }
  const __mmask16 lanes = (__mmask16)((1u << width) - 1);
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < COLUMNS * kFields; j++) {
      float* to = sum + r * sum_stride + j % kFields * field_stride + j / kFields * 16;
      const __m512 page = _mm512_fmadd_ps(sums.template total<8>(r, j), _mm512_set1_ps(p.step[r]), _mm512_set1_ps(p.bias[r * p.bias_stride]));
      _mm512_mask_storeu_ps(to, lanes, _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, to), page));
    }
}
