// Integer products of 8-, 4- and 2-bit codes with AVX512-VNNI: queries as 15-bit, weights as 16-bit integers, each split
// into two bytes. Rounding multiplies codes with their middle taken out, since the middle is subtracted with the sums of
// the rounded numbers. Included by attend.inl for the variant that has the instructions.

#include <immintrin.h>

constexpr float kQueryLevels = 16256.f;   // 127 * 128: the largest hi * 128 + lo of two signed bytes
constexpr float kWeightLevels = 65535.f;  // hi * 256 + lo of two unsigned bytes

inline int32_t four_bytes(const void* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return x;
}

template <int BITS>
inline __m512i field_of(__m512i words, int f) {
  if (BITS == 8) return words;
  return _mm512_and_si512(_mm512_srli_epi16(words, BITS * f), _mm512_set1_epi8((1 << BITS) - 1));
}

// Two bytes per channel of one row's folded query, and what turns their products into scores.
struct RoundedQuery {
  int8_t *high, *low;
  float step, offset;
};

// Lines of words that share the broadcasts of one step: two where a byte holds a single code, else one.
template <int BITS>
constexpr int lines_at_once() {
  return BITS == 8 ? 2 : 1;
}

// scores[r][t] = step * (q . codes) + offset for LINES blocks of 16 * (8 / BITS) tokens.
template <int BITS, int ROWS, int LINES>
inline void vnni_key_products(const uint8_t* words, const RoundedQuery* q, int dim, float* scores, int stride, int64_t ahead) {
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
      const __m512i h = _mm512_set1_epi32(four_bytes(q[r].high + 4 * i)), l = _mm512_set1_epi32(four_bytes(q[r].low + 4 * i));
      for (int f = 0; f < kBlocks; f++) {
        high[r][f] = _mm512_dpbusd_epi32(high[r][f], code[f], h);
        low[r][f] = _mm512_dpbusd_epi32(low[r][f], code[f], l);
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

// sum[f][r][lane] += step[f][r] * (weights . codes) for LINES times 16 channels of every field, `lanes` in all; codes of
// 8 bits less 128.
template <int BITS, int ROWS, int LINES>
inline void vnni_value_products(const uint8_t* words, int words_per_row, int tokens, const uint8_t* const* high,
                                const uint8_t* const* low, int stride, const float* const* step, float* const* sum, int sum_stride,
                                int lanes, int64_t ahead) {
  constexpr int kFields = 8 / BITS;
  __m512i h[ROWS][LINES][kFields], l[ROWS][LINES][kFields];
  for (int r = 0; r < ROWS; r++)
    for (int line = 0; line < LINES; line++)
      for (int f = 0; f < kFields; f++) h[r][line][f] = l[r][line][f] = _mm512_setzero_si512();
  for (int i = 0; i < tokens / 4; i++) {
    __m512i w[LINES];
    for (int line = 0; line < LINES; line++) {
      const uint8_t* at = words + int64_t(4) * i * words_per_row + 64 * line;
      w[line] = _mm512_loadu_si512(at);
      prefetch(at + ahead);
      if (BITS == 8) w[line] = _mm512_xor_si512(w[line], _mm512_set1_epi8((char)0x80));
    }
    for (int f = 0; f < kFields; f++)
      for (int r = 0; r < ROWS; r++) {
        const __m512i ph = _mm512_set1_epi32(four_bytes(high[f] + r * stride + 4 * i));
        const __m512i pl = _mm512_set1_epi32(four_bytes(low[f] + r * stride + 4 * i));
        for (int line = 0; line < LINES; line++) {
          const __m512i code = field_of<BITS>(w[line], f);
          h[r][line][f] = _mm512_dpbusd_epi32(h[r][line][f], ph, code);
          l[r][line][f] = _mm512_dpbusd_epi32(l[r][line][f], pl, code);
        }
      }
  }
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < LINES * kFields; i++) {
      const int line = i / kFields, f = i % kFields;
      const __mmask16 mask = (__mmask16)((1u << std::min(16, lanes - 16 * line)) - 1);
      float* to = sum[f] + r * sum_stride + 16 * line;
      const __m512 product = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(h[r][line][f], 8), l[r][line][f]));
      const __m512 total = _mm512_fmadd_ps(product, _mm512_set1_ps(step[f][r]), _mm512_maskz_loadu_ps(mask, to));
      _mm512_mask_storeu_ps(to, mask, total);
    }
}

// x as high * 128 + low times the step that is returned; the sum of the rounded integers goes to `total`.
inline float round_query(const float* x, int n, int8_t* high, int8_t* low, int64_t* total) {
  Vf top = {};
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    const Vf y = load(x + i), negative = -y;
    const Vf magnitude = y > negative ? y : negative;
    top = magnitude > top ? magnitude : top;
  }
  float largest = 1e-30f;
  for (int j = 0; j < LANES; j++) largest = std::max(largest, top[j]);
  for (; i < n; i++) largest = std::max(largest, std::fabs(x[i]));
  const float inverse = kQueryLevels / largest;
  int32_t sum = 0;
  for (int d = 0; d < n; d++) {
    const int32_t rounded = int32_t(x[d] * inverse + (x[d] >= 0.f ? 0.5f : -0.5f));
    const int32_t h = (rounded + 64) >> 7;
    high[d] = int8_t(h);
    low[d] = int8_t(rounded - 128 * h);
    sum += rounded;
  }
  *total = sum;
  return largest / kQueryLevels;
}

// x >= 0 as high * 256 + low times the step that is returned; the sum of the rounded integers goes to `total`.
inline float round_weights(const float* x, int n, uint8_t* high, uint8_t* low, int64_t* total) {
  Vf top = {};
  for (int t = 0; t < n; t += LANES) top = load(x + t) > top ? load(x + t) : top;
  float largest = 0.f;
  for (int j = 0; j < LANES; j++) largest = std::max(largest, top[j]);
  const float inverse = largest > 0.f ? kWeightLevels / largest : 0.f;
  int32_t sum = 0;
  for (int t = 0; t < n; t++) {
    const int32_t rounded = int32_t(x[t] * inverse + 0.5f);
    high[t] = uint8_t(rounded >> 8);
    low[t] = uint8_t(rounded);
    sum += rounded;
  }
  *total = sum;
  return largest / kWeightLevels;
}
