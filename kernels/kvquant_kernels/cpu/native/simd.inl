// Vectors of LANES floats, and the few functions on them that the kernels share.

typedef float Vf __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Vi __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t Vh __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

template <int N>
using Int = std::integral_constant<int, N>;

// For functions that do nothing but fetch: GCC takes them to have no effect, and drops calls that it has not inlined before.
#define KVQ_INLINE inline __attribute__((always_inline))
#define KVQ_INLINED __attribute__((always_inline))  // of lambdas

// Calls f with the constants 0 to N - 1. Arrays of registers that loops index would be in memory: GCC unrolls outer ones late.
template <class F, int... I>
KVQ_INLINE void each_of(std::integer_sequence<int, I...>, F f) {
  (f(Int<I>()), ...);
}
template <int N, class F>
KVQ_INLINE void each(F f) {
  each_of(std::make_integer_sequence<int, N>(), f);
}

constexpr int kWordLanes = 16;  // tokens or channels side by side in the words of a page
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

inline int64_t align16(int64_t n) { return (n + 15) & ~int64_t(15); }

inline Vf load(const float* p) { return *(const Vf*)p; }
inline void store(float* p, Vf x) { *(Vf*)p = x; }
inline Vi load_words(const uint8_t* p) { return *(const Vi*)p; }

// Into the first-level cache, although it is small: on Zen 5 this is faster than into the second.
KVQ_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p, 0, 3); }
KVQ_INLINE void prefetch_for_later(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

inline Vf to_float(Vi x) { return __builtin_convertvector(x, Vf); }
template <class To, class From>
inline To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

// No step of it goes through a denormal float, which the process may have been told to flush to zero.
inline float half_to_float(uint16_t half) {
  const uint32_t magnitude = uint32_t(half & 0x7fff) << 13, sign = uint32_t(half & 0x8000) << 16;
  const bool is_special = (half & 0x7c00) == 0x7c00, is_subnormal = (half & 0x7c00) == 0;
  const float normal = bits_of<float>(magnitude + (is_special ? 0x70000000u : 0x38000000u));
  const float x = is_subnormal ? float(half & 0x03ff) * 0x1p-24f : normal;
  return bits_of<float>(bits_of<uint32_t>(x) | sign);
}

// LANES numbers of a KvqDtype.
template <int DTYPE>
inline Vf load_as(const void* p) {
  if constexpr (DTYPE == KVQ_F32) return *(const Vf*)p;
#ifdef __AVX512F__
  const __m256i x16 = _mm256_loadu_si256((const __m256i*)p);
  if constexpr (DTYPE == KVQ_BF16) return bits_of<Vf>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x16), 16));
  if constexpr (DTYPE == KVQ_F16) return bits_of<Vf>(_mm512_cvtph_ps(x16));
#elif defined(__F16C__)
  if constexpr (DTYPE == KVQ_F16) return bits_of<Vf>(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)));
#endif
  if constexpr (DTYPE == KVQ_BF16) return bits_of<Vf>(__builtin_convertvector(*(const Vh*)p, Vi) << 16);
  Vf x;
  for (int j = 0; j < LANES; j++) x[j] = half_to_float((*(const Vh*)p)[j]);
  return x;
}

template <int DTYPE>
inline float load_one(const void* p) {
  if constexpr (DTYPE == KVQ_F32) return *(const float*)p;
  uint16_t x;
  memcpy(&x, p, 2);
  return DTYPE == KVQ_F16 ? half_to_float(x) : bits_of<float>(uint32_t(x) << 16);
}

// n numbers of a KvqDtype, from number `at` on.
template <int DTYPE>
inline void load_row(const void* from, int64_t at, int n, float* to) {
  constexpr int kBytes = DTYPE == KVQ_F32 ? 4 : 2;
  const char* x = (const char*)from + kBytes * at;
  int i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, load_as<DTYPE>(x + kBytes * i));
  for (; i < n; i++) to[i] = load_one<DTYPE>(x + kBytes * i);
}

template <class F>
inline void by_dtype(int dtype, F f) {
  if (dtype == KVQ_F32) return f(Int<KVQ_F32>());
  if (dtype == KVQ_F16) return f(Int<KVQ_F16>());
  return f(Int<KVQ_BF16>());
}

inline void load_row(int dtype, const void* from, int64_t at, int n, float* to) {
  by_dtype(dtype, [&](auto known) { load_row<known.value>(from, at, n, to); });
}

// The nearest float16, halves to even; infinite beyond the largest. In integers, whatever happens to denormals.
inline uint16_t float_to_half(float x) {
  const uint32_t bits = bits_of<uint32_t>(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // a multiple of 2^-24 below 2^-14
    const int shift = 126 - int(magnitude >> 23);
    if (shift > 24) return uint16_t(sign);
    const uint32_t mantissa = (magnitude & 0x7fffff) | 0x800000, rounded = (mantissa + (1u << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift;
    return uint16_t(sign | rounded);
  }
  return uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

inline uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = bits_of<uint32_t>(x);
  return x != x ? uint16_t(0x7fc0) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void store_row(int dtype, const float* from, int n, void* to, int64_t at) {
  if (dtype == KVQ_F32) {
    memcpy((float*)to + at, from, n * sizeof(float));
  } else if (dtype == KVQ_F16) {
    for (int i = 0; i < n; i++) ((uint16_t*)to)[at + i] = float_to_half(from[i]);
  } else {
    for (int i = 0; i < n; i++) ((uint16_t*)to)[at + i] = float_to_bfloat16(from[i]);
  }
}

// 2 ** x for x in -0.5..0.5.
inline Vf exp2_of_fraction(Vf x) {
  Vf p = x * 1.535336188319500e-4f + 1.339887440266574e-3f;
  p = p * x + 9.618437357674640e-3f;
  p = p * x + 5.550332471162809e-2f;
  p = p * x + 2.402264791363012e-1f;
  p = p * x + 6.931472028550421e-1f;
  return p * x + 1.0f;
}

// 2 ** x with x <= 0 up to rounding; exactly 0 below -126, NaN for NaN.
inline Vf exp2_nonpositive(Vf x) {
#ifdef __AVX512F__
  const __m512 exact = bits_of<__m512>(x), whole = _mm512_roundscale_ps(exact, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vf p = exp2_of_fraction(x - bits_of<Vf>(whole));
  // Of -inf, whose fraction is NaN, as well: not below -126 is also what NaN is.
  const __mmask16 counts = _mm512_cmp_ps_mask(exact, _mm512_set1_ps(-126.f), _CMP_NLT_UQ);
  return bits_of<Vf>(_mm512_maskz_scalef_ps(counts, bits_of<__m512>(p), whole));
#else
  const Vf zero = {}, least = zero - 126.f;
  const Vf clamped = x < least ? least : x;
  const Vf shifted = clamped + 12582912.f;  // 1.5 * 2^23: the low mantissa bits now hold the rounded integer
  const Vi n = bits_of<Vi>(shifted) - 0x4b400000;
  return x < least ? zero : exp2_of_fraction(clamped - (shifted - 12582912.f)) * bits_of<Vf>((n + 127) << 23);
#endif
}

inline float exp2_nonpositive(float x) {
  const Vf zero = {};
  return exp2_nonpositive(zero + x)[0];
}

inline float sum_of(Vf x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps(bits_of<__m512>(x));
#endif
  float total = 0.f;
  for (int j = 0; j < LANES; j++) total += x[j];
  return total;
}

// The sum of each of some vectors.
template <int COUNT>
inline void store_sums(const Vf (&x)[COUNT], float* to) {
#ifdef __AVX512F__
  if constexpr (COUNT == 4) {  // four at once, pairwise
    __m256 half[4];
    for (int i = 0; i < 4; i++) {
      const __m512 whole = bits_of<__m512>(x[i]);
      half[i] = _mm256_add_ps(_mm512_castps512_ps256(whole), _mm512_extractf32x8_ps(whole, 1));
    }
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    return _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
  }
#endif
  for (int i = 0; i < COUNT; i++) to[i] = sum_of(x[i]);
}

inline float max_of(Vf x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps(bits_of<__m512>(x));
#endif
  float best = x[0];
  for (int j = 1; j < LANES; j++) best = x[j] > best ? x[j] : best;
  return best;
}

// Sums of n numbers, n a multiple of 16 or not.
inline float dot(const float* x, const float* y, int n) {
  Vf even = {}, odd = {};
  int i = 0;
  for (; i + 2 * LANES <= n; i += 2 * LANES) {
    even += load(x + i) * load(y + i);
    odd += load(x + i + LANES) * load(y + i + LANES);
  }
  float total = sum_of(even + odd);
  for (; i < n; i++) total += x[i] * y[i];
  return total;
}

inline float sum_of(const float* x, int n) {
  Vf acc = {};
  int i = 0;
  for (; i + LANES <= n; i += LANES) acc += load(x + i);
  float total = sum_of(acc);
  for (; i < n; i++) total += x[i];
  return total;
}

// One step of the rotation for distances within a vector: lanes j and j ^ DISTANCE become their sum and their difference.
template <int DISTANCE>
inline Vf butterfly(Vf x) {
  Vf other = x, sign = x;
  for (int j = 0; j < LANES; j++) {
    other[j] = x[j ^ DISTANCE];
    sign[j] = j & DISTANCE ? -1.f : 1.f;
  }
  return other + x * sign;
}

template <int DISTANCE>
inline void butterflies(float* x, int dim, int block) {
  if (DISTANCE >= block) return;
  for (int i = 0; i < dim; i += LANES) store(x + i, butterfly<DISTANCE>(load(x + i)));
  if constexpr (2 * DISTANCE < LANES) butterflies<2 * DISTANCE>(x, dim, block);
}

// Butterflies of distance 1, 2, 4, ... over blocks of the largest power of two that divides dim, as rotation.py defines.
inline void rotate(float* x, int dim) {
  const int block = dim & -dim;
  int distance = 1;
  if (dim % LANES == 0) {
    butterflies<1>(x, dim, block);
    distance = LANES;
  }
  for (; distance < block; distance *= 2)
    for (int i = 0; i < dim; i += 2 * distance)
      for (int j = i; j < i + distance; j++) {
        const float a = x[j], b = x[j + distance];
        x[j] = a + b;
        x[j + distance] = a - b;
      }
  const float scale = float(1.0 / std::sqrt(double(block)));
  for (int i = 0; i < dim; i++) x[i] *= scale;
}
