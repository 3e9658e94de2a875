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

// Rows that are computed together: as many as keep their sums in registers.
template <int BITS>
constexpr int kRowsAtOnce = BITS == 2 ? 2 : kGroupOfRows;

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

// Two bytes per channel of one row's folded query, and what turns their products into scores.
struct RoundedQuery {
  uint8_t *high, *low;
  float step, offset;
};

// scores[r][t] = step * (q . codes) + offset for 16 * (8 / BITS) tokens.
template <int BITS, int ROWS>
KVQ_NOINLINE void vnni_key_products(const uint8_t* words, const RoundedQuery* q, int dim, float* scores, int stride, int64_t ahead) {
  constexpr int kFields = 8 / BITS;
  Sums<ROWS, kFields> sums;
  for (int i = 0; i < dim / 4; i++, words += 64) {
    const __m512i w = _mm512_loadu_si512(words);
    prefetch(words + ahead);
    for (int r = 0; r < ROWS; r++) {
      const __m512i h = broadcast_four_bytes(q[r].high + 4 * i), l = broadcast_four_bytes(q[r].low + 4 * i);
      for (int f = 0; f < kFields; f++) {
        sums.high[r][f] = add_products_of_bytes(sums.high[r][f], field_of<BITS>(w, f), h);
        sums.low[r][f] = add_products_of_bytes(sums.low[r][f], field_of<BITS>(w, f), l);
      }
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int f = 0; f < kFields; f++)
      _mm512_storeu_ps(scores + r * stride + 16 * f, _mm512_fmadd_ps(sums.template total<7>(r, f), _mm512_set1_ps(q[r].step), _mm512_set1_ps(q[r].offset)));
}

// Two bytes per token of some rows' folded weights: those of row r begin r * stride further.
struct RoundedWeights {
  const uint8_t *high, *low;
  const float* step;
  int stride;
};

// sum[r][f * field_stride + lane] = step[r] * (weights . codes), for a column of `width` words; codes of 8 bits less 128.
template <int BITS, int ROWS>
KVQ_NOINLINE void vnni_value_products(const uint8_t* words, int width, int tokens, RoundedWeights p, float* sum, int sum_stride,
                                      int field_stride, int64_t ahead) {
  constexpr int kFields = 8 / BITS;
  Sums<ROWS, kFields> sums;
  for (int i = 0; i < tokens / 4; i++, words += 4 * width) {
    __m512i w = _mm512_loadu_si512(words);
    prefetch(words + ahead);
    if (BITS == 8) w = _mm512_xor_si512(w, _mm512_set1_epi8((char)0x80));
    for (int r = 0; r < ROWS; r++) {
      const __m512i h = broadcast_four_bytes(p.high + r * p.stride + 4 * i), l = broadcast_four_bytes(p.low + r * p.stride + 4 * i);
      for (int f = 0; f < kFields; f++) {
        sums.high[r][f] = add_products_of_bytes(sums.high[r][f], h, field_of<BITS>(w, f));
        sums.low[r][f] = add_products_of_bytes(sums.low[r][f], l, field_of<BITS>(w, f));
      }
    }
  }
  const __mmask16 lanes = (__mmask16)((1u << width) - 1);
  for (int r = 0; r < ROWS; r++)
    for (int f = 0; f < kFields; f++)
      _mm512_mask_storeu_ps(sum + r * sum_stride + f * field_stride, lanes, _mm512_mul_ps(sums.template total<8>(r, f), _mm512_set1_ps(p.step[r])));
}

inline void store_bytes(void* p, __m512i x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x)); }

struct Rounded {
  float step, offset;
};

// Folds scales into a query or into weights, and rounds the products to integers of two bytes: x * scale as high * 128 + low
// of signed bytes if IS_SIGNED, else as high * 256 + low of unsigned ones, times step. offset: what is to be added to
// step * (integers . codes), which is x . zero less the middle of the codes. Counts n up to a multiple of 16; what is beyond
// n must be zero.
template <bool IS_SIGNED>
inline Rounded fold_and_round(const float* x, const float* scale, const float* zero, float middle, int n, uint8_t* high, uint8_t* low) {
  constexpr int kLowBits = IS_SIGNED ? 7 : 8;
  __m512 top = _mm512_setzero_ps(), product = _mm512_setzero_ps();
  for (int i = 0; i < n; i += 16) {
    const __m512 y = _mm512_loadu_ps(x + i), folded = _mm512_mul_ps(y, _mm512_loadu_ps(scale + i));
    top = _mm512_max_ps(_mm512_abs_ps(folded), top);  // leaves NaN aside, which reaches the offset through 0 * NaN
    product = _mm512_fmadd_ps(y, _mm512_loadu_ps(zero + i), product);
    product = _mm512_fmadd_ps(folded, _mm512_setzero_ps(), product);
  }
  const float largest = std::max(_mm512_reduce_max_ps(top), 1e-30f), levels = IS_SIGNED ? kQueryLevels : kWeightLevels;
  const __m512 inverse = _mm512_set1_ps(levels / largest);
  __m512i total = _mm512_setzero_si512();
  for (int i = 0; i < n; i += 16) {
    const __m512 folded = _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_loadu_ps(scale + i));
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(folded, inverse));
    const __m512i h = _mm512_srai_epi32(_mm512_add_epi32(rounded, _mm512_set1_epi32(IS_SIGNED ? 64 : 0)), kLowBits);
    store_bytes(high + i, h);
    store_bytes(low + i, IS_SIGNED ? _mm512_sub_epi32(rounded, _mm512_slli_epi32(h, kLowBits)) : rounded);
    total = _mm512_add_epi32(total, rounded);
  }
  const float step = largest / levels;
  return {step, _mm512_reduce_add_ps(product) - middle * step * float(_mm512_reduce_add_epi32(total))};
}
