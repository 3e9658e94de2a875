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

// Rows, and lines of 16 words, that are computed together: as many as keep their sums in registers.
template <int BITS>
constexpr int kRowsAtOnce = BITS == 2 ? 2 : kGroupOfRows;
template <int BITS, int ROWS>
constexpr int kLinesAtOnce = std::max(1, kRowsAtOnce<BITS> / ROWS * (BITS == 8 ? 2 : 1));

// Calls f with ROWS rows and LINES of the lines first..last-1 at a time, for all of them: f(ROWS, LINES, row, line).
template <int BITS, class F>
inline void in_blocks(int rows, int first, int last, F f) {
  for (int r = 0; r < rows; r += kRowsAtOnce<BITS>)
    with_constant<kRowsAtOnce<BITS>>(rows - r, [&](auto count) {
      constexpr int kLines = kLinesAtOnce<BITS, count.value>;
      int line = first;
      for (; line + kLines <= last; line += kLines) f(count, Int<kLines>(), r, line);
      for (; line < last; line++) f(count, Int<1>(), r, line);
    });
}

// Two bytes per channel of one row's folded query, and what turns their products into scores.
struct RoundedQuery {
  uint8_t *high, *low;
  float step, offset;
};

// scores[r][t] = step * (q . codes) + offset for LINES blocks of 16 * (8 / BITS) tokens.
template <int BITS, int ROWS, int LINES>
KVQ_NOINLINE void vnni_key_products(const uint8_t* words, const RoundedQuery* q, int dim, float* scores, int stride, int64_t ahead) {
  constexpr int kFields = 8 / BITS, kBlocks = LINES * kFields;
  __m512i high[ROWS][kBlocks], low[ROWS][kBlocks];
  for (int r = 0; r < ROWS; r++)
    for (int f = 0; f < kBlocks; f++) high[r][f] = low[r][f] = _mm512_setzero_si512();
  for (int i = 0; i < dim / 4; i++) {
    __m512i code[kBlocks];
    for (int line = 0; line < LINES; line++) {
      const uint8_t* at = words + 16 * dim * line + 64 * i;
      const __m512i w = _mm512_loadu_si512(at);
      prefetch(at + ahead);
      for (int f = 0; f < kFields; f++) code[line * kFields + f] = field_of<BITS>(w, f);
    }
    for (int r = 0; r < ROWS; r++) {
      const __m512i h = broadcast_four_bytes(q[r].high + 4 * i), l = broadcast_four_bytes(q[r].low + 4 * i);
      for (int f = 0; f < kBlocks; f++) {
        high[r][f] = add_products_of_bytes(high[r][f], code[f], h);
        low[r][f] = add_products_of_bytes(low[r][f], code[f], l);
      }
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int f = 0; f < kBlocks; f++) {
      const __m512i both = _mm512_add_epi32(_mm512_slli_epi32(high[r][f], 7), low[r][f]);
      const __m512 score = _mm512_fmadd_ps(_mm512_cvtepi32_ps(both), _mm512_set1_ps(q[r].step), _mm512_set1_ps(q[r].offset));
      _mm512_storeu_ps(scores + r * stride + 16 * f, score);
    }
}

// Two bytes per token of some rows' folded weights: those of row r begin r * stride further.
struct RoundedWeights {
  const uint8_t *high, *low;
  const float* step;
  int stride;
};

// sum[r][f * field_stride + lane] = step[r] * (weights . codes), for LINES columns of 16 words, or one of `width` words;
// codes of 8 bits less 128.
template <int BITS, int ROWS, int LINES>
KVQ_NOINLINE void vnni_value_products(const uint8_t* words, int width, int tokens, RoundedWeights p, float* sum, int sum_stride,
                                      int field_stride, int64_t ahead) {
  constexpr int kFields = 8 / BITS, kBlocks = LINES * kFields;
  __m512i high[ROWS][kBlocks], low[ROWS][kBlocks];
  for (int r = 0; r < ROWS; r++)
    for (int f = 0; f < kBlocks; f++) high[r][f] = low[r][f] = _mm512_setzero_si512();
  for (int i = 0; i < tokens / 4; i++) {
    __m512i code[kBlocks];
    for (int line = 0; line < LINES; line++) {
      const uint8_t* at = words + 4 * (int64_t(i) * width + line * 4 * tokens);
      __m512i w = _mm512_loadu_si512(at);
      prefetch(at + ahead);
      if (BITS == 8) w = _mm512_xor_si512(w, _mm512_set1_epi8((char)0x80));
      for (int f = 0; f < kFields; f++) code[line * kFields + f] = field_of<BITS>(w, f);
    }
    for (int r = 0; r < ROWS; r++) {
      const __m512i h = broadcast_four_bytes(p.high + r * p.stride + 4 * i), l = broadcast_four_bytes(p.low + r * p.stride + 4 * i);
      for (int f = 0; f < kBlocks; f++) {
        high[r][f] = add_products_of_bytes(high[r][f], h, code[f]);
        low[r][f] = add_products_of_bytes(low[r][f], l, code[f]);
      }
    }
  }
  const __mmask16 lanes = (__mmask16)((1u << width) - 1);
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < kBlocks; i++) {
      const int line = i / kFields, f = i % kFields;
      const __m512i both = _mm512_add_epi32(_mm512_slli_epi32(high[r][i], 8), low[r][i]);
      const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(both), _mm512_set1_ps(p.step[r]));
      _mm512_mask_storeu_ps(sum + r * sum_stride + f * field_stride + 16 * line, lanes, product);
    }
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
