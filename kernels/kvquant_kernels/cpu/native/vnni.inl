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
  // Where to fetch 4 bytes for every number of a row in pass 0 or 1 over it.
  const uint8_t* lines_of(int pass, int r) const { return lines.first + kBytesPerNumber / 2 * (2 * r + pass) * n; }
};

// What rounding makes of rows: x * scale as integers of two bytes that count `step`, and what is to be added to step times
// their products with codes: x . zero less the integers' products with the middle of the codes. Bytes of a row begin
// `stride` after those of the one before.
struct Rounded {
  uint8_t *high, *low;
  float *step, *offset;
  int stride;

  Rounded from(int r) const { return {high + r * stride, low + r * stride, step + r, offset + r, stride}; }
};

// The largest |x * scale| of each row, NaN left aside, and x . zero lane by lane, or NaN if a scale is.
template <int ROWS>
KVQ_INLINE void measure(const Unfolded& f, float (&largest)[ROWS], __m512 (&product)[ROWS]) {
  __m512 top[ROWS], nothing = _mm512_setzero_ps();
  const uint8_t* lines[ROWS];
  each<ROWS>([&](auto r) KVQ_INLINED {
    top[r] = _mm512_set1_ps(1e-30f);
    product[r] = nothing;
    lines[r] = f.lines_of(0, r);
  });
  for (int i = 0; i < f.n; i += 16) {
    const __m512 scale = _mm512_loadu_ps(f.scale + i), zero = _mm512_loadu_ps(f.zero + i);
    each<ROWS>([&](auto r) KVQ_INLINED {
      const __m512 x = f.row(r, i);
      top[r] = _mm512_max_ps(_mm512_abs_ps(_mm512_mul_ps(x, scale)), top[r]);
      product[r] = _mm512_fmadd_ps(x, zero, product[r]);
      if (r < f.lines.rows) prefetch(lines[r] + kBytesPerNumber / 2 * i);
    });
    nothing = _mm512_fmadd_ps(scale, _mm512_setzero_ps(), nothing);
  }
  each<ROWS>([&](auto r) KVQ_INLINED {
    largest[r] = _mm512_reduce_max_ps(top[r]);
    product[r] = _mm512_add_ps(product[r], nothing);
  });
}

// Folds and rounds: to high * 128 + low of signed bytes if IS_SIGNED, else to high * 256 + low of unsigned ones.
template <bool IS_SIGNED, int ROWS>
KVQ_INLINE void fold_and_round(Unfolded f, float middle, Rounded to) {
  constexpr float kLevels = IS_SIGNED ? kQueryLevels : kWeightLevels;
  constexpr int kLowBits = IS_SIGNED ? 7 : 8;
  float largest[ROWS];
  __m512 product[ROWS], levels[ROWS];
  __m512i total[ROWS];
  const uint8_t* lines[ROWS];
  measure<ROWS>(f, largest, product);
  each<ROWS>([&](auto r) KVQ_INLINED {
    levels[r] = _mm512_set1_ps(kLevels / largest[r]);
    total[r] = _mm512_setzero_si512();
    lines[r] = f.lines_of(1, r);
  });
  for (int i = 0; i < f.n; i += 16) {
    const __m512 scale = _mm512_loadu_ps(f.scale + i);
    each<ROWS>([&](auto r) KVQ_INLINED {
      const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_mul_ps(f.row(r, i), scale), levels[r]));
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(rounded, _mm512_set1_epi32(IS_SIGNED ? 64 : 0)), kLowBits);
      store_bytes(to.high + r * to.stride + i, high);
      store_bytes(to.low + r * to.stride + i, IS_SIGNED ? _mm512_sub_epi32(rounded, _mm512_slli_epi32(high, kLowBits)) : rounded);
      total[r] = _mm512_add_epi32(total[r], rounded);
      if (r < f.lines.rows) prefetch(lines[r] + kBytesPerNumber / 2 * i);
    });
  }
  each<ROWS>([&](auto r) KVQ_INLINED {
    to.step[r] = largest[r] * (1.f / kLevels);
    const __m512 middles = _mm512_mul_ps(_mm512_cvtepi32_ps(total[r]), _mm512_set1_ps(middle * to.step[r]));
    to.offset[r] = _mm512_reduce_add_ps(_mm512_sub_ps(product[r], middles)) + largest[r] * 0.f;  // NaN if it is infinite
  });
}

// How many rows are computed together, of those that are left, and blocks of words side by side, so that broadcasts are shared
// and sums do not wait for each other: as many as keep the sums in at most 24 registers.
template <int BITS>
constexpr int kRowsAtOnce = BITS == 2 ? 3 : kGroupOfRows;
template <int BITS, int ROWS>
constexpr int kBlocksAtOnce = 8 / BITS * ROWS <= 3 ? 4 : 8 / BITS * ROWS <= 6 ? 2 : 1;

// The sums of products with high bytes and with low ones.
template <int ROWS, int FIELDS>
struct Sums {
  __m512i high[ROWS][FIELDS], low[ROWS][FIELDS];

  KVQ_INLINE Sums() {
    each<ROWS>([&](auto r) KVQ_INLINED {
      each<FIELDS>([&](auto f) KVQ_INLINED { high[r][f] = low[r][f] = _mm512_setzero_si512(); });
    });
  }

  // Adds products of four codes, in the words of some blocks, with the four bytes from byte `at` on of every row: unsigned
  // codes with signed bytes, or the other way round.
  template <int BITS, bool SIGNED_CODES, int BLOCKS>
  KVQ_INLINE void add(const __m512i (&words)[BLOCKS], const Rounded& x, int at) {
    constexpr int kFields = 8 / BITS;
    each<ROWS>([&](auto r) KVQ_INLINED {
      const __m512i h = broadcast_four_bytes(x.high + r * x.stride + at), l = broadcast_four_bytes(x.low + r * x.stride + at);
      each<FIELDS>([&](auto j) KVQ_INLINED {
        const __m512i codes = field_of<BITS>(words[j / kFields], j % kFields);
        high[r][j] = SIGNED_CODES ? add_products_of_bytes(high[r][j], h, codes) : add_products_of_bytes(high[r][j], codes, h);
        low[r][j] = SIGNED_CODES ? add_products_of_bytes(low[r][j], l, codes) : add_products_of_bytes(low[r][j], codes, l);
      });
    });
  }

  // With high bytes counting 2 ** SHIFT times as much.
  template <int SHIFT>
  KVQ_INLINE __m512 total(int r, int f) const {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[r][f], SHIFT), low[r][f]));
  }
};

// Both kinds of products fetch what is `ahead` in the order in which it lies, not block beside block: memory is faster then.
// Rounded is passed by reference: its copy would be written in pieces and read as a whole, for which processors wait.

// scores[r][t] = step * (q . codes) + offset for the 16 * (8 / BITS) tokens of each of some blocks.
template <int BITS, int BLOCKS, int ROWS>
KVQ_NOINLINE void vnni_key_products(const uint8_t* words, const Rounded& q, int dim, float* scores, int stride, int64_t ahead) {
  constexpr int kFields = 8 / BITS, kSums = BLOCKS * kFields;
  const int64_t block = 16 * dim;
  Sums<ROWS, kSums> sums;
  const uint8_t* fetched = words + ahead;
  for (int i = 0; i < dim / 4; i++, words += 64, fetched += 64 * BLOCKS) {
    __m512i w[BLOCKS];
    each<BLOCKS>([&](auto k) KVQ_INLINED {
      w[k] = _mm512_loadu_si512(words + k * block);
      prefetch(fetched + 64 * k);
    });
    sums.template add<BITS, false>(w, q, 4 * i);
  }
  each<ROWS * kSums>([&](auto i) KVQ_INLINED {
    constexpr int r = i / kSums, j = i % kSums;
    const __m512 score = _mm512_fmadd_ps(sums.template total<7>(r, j), _mm512_set1_ps(q.step[r]), _mm512_set1_ps(q.offset[r]));
    _mm512_storeu_ps(scores + r * stride + 16 * j, score);
  });
}

// sum[r][f * field_stride + 16 * k + lane] += step[r] * (p . codes) + offset[r], for some columns k of `width` words, which
// is 16 if there are several; codes of 8 bits less 128. The two terms nearly cancel: they are added to each other first.
template <int BITS, int COLUMNS, int ROWS>
KVQ_NOINLINE void vnni_value_products(const uint8_t* words, int width, int tokens, const Rounded& p, float* sum, int sum_stride,
                                      int field_stride, int64_t ahead) {
  constexpr int kFields = 8 / BITS, kSums = COLUMNS * kFields;
  const int64_t column = 16 * tokens;
  Sums<ROWS, kSums> sums;
  const uint8_t* fetched = words + ahead;
  for (int i = 0; i < tokens / 4; i++, words += 4 * width, fetched += 4 * width * COLUMNS) {
    __m512i w[COLUMNS];
    each<COLUMNS>([&](auto k) KVQ_INLINED {
      w[k] = _mm512_loadu_si512(words + k * column);
      prefetch(fetched + 4 * width * k);
      if (BITS == 8) w[k] = _mm512_xor_si512(w[k], _mm512_set1_epi8((char)0x80));
    });
    sums.template add<BITS, true>(w, p, 4 * i);
  }
  const __mmask16 lanes = (__mmask16)((1u << width) - 1);
  each<ROWS * kSums>([&](auto i) KVQ_INLINED {
    constexpr int r = i / kSums, j = i % kSums;
    float* to = sum + r * sum_stride + j % kFields * field_stride + j / kFields * 16;
    const __m512 page = _mm512_fmadd_ps(sums.template total<8>(r, j), _mm512_set1_ps(p.step[r]), _mm512_set1_ps(p.offset[r]));
    _mm512_mask_storeu_ps(to, lanes, _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, to), page));
  });
}
