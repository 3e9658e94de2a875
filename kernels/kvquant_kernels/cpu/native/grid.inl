// What codes stand for, and the nearest codes of numbers. See kvquant/formats.py.

// The least float16 not below x >= 0. Positive float16 numbers are ordered as their bit patterns.
inline float round_up_to_half(float x) {
  const uint16_t nearest = float_to_half(x);
  return half_to_float(uint16_t(nearest + (half_to_float(nearest) < x)));
}

// The nearest multiple of 1, halves to even, of a number below 2^22.
inline float nearest_integer(float x) { return (x + 12582912.f) - 12582912.f; }

// |x| no larger than the type's largest number as its code, rounded to nearest, halves to even.
template <int MANTISSA, int BIAS>
inline uint8_t float_to_eight_bits(float x, float steps_per_one) {
  constexpr int kShift = 23 - MANTISSA;
  const uint32_t bits = bits_of<uint32_t>(x), magnitude = bits & 0x7fffffff;
  const uint32_t normal = ((magnitude + (1u << (kShift - 1)) - 1 + (magnitude >> kShift & 1)) >> kShift) - (BIAS << MANTISSA);
  const float m = bits_of<float>(magnitude);
  const bool is_subnormal = m * steps_per_one < float(1 << MANTISSA);
  return uint8_t((is_subnormal ? uint32_t(nearest_integer(m * steps_per_one)) : normal) | (bits >> 24 & 0x80));
}

// Every number of a group without width rounds to the zero point.
inline float divisor(float scale) { return scale == 0.f ? 1.f : scale; }

struct Grid {
  const KvqPages& p;
  float value_of[256];

  explicit Grid(const KvqPages& pages) : p(pages) {
    for (int code = 0; code < 256; code++) value_of[code] = decoded(code);
  }

  float decoded(int code) const {
    if (p.part.code == KVQ_INTEGER) return float(code) - p.half_width;
    const int mantissa = p.part.code == KVQ_E4M3 ? 3 : 2, bias = p.part.code == KVQ_E4M3 ? 120 : 112;
    const float step = p.part.code == KVQ_E4M3 ? 0x1p-9f : 0x1p-16f;
    const uint32_t magnitude = code & 0x7f;
    const float x = magnitude < (1u << mantissa) ? float(magnitude) * step : bits_of<float>((magnitude << (23 - mantissa)) + (bias << 23));
    return code & 0x80 ? -x : x;
  }

  // Codes of n numbers, each in a group of its own or all in one.
  template <class ByNumber>
  void encode(const float* x, int n, const float* scale, const float* zero, ByNumber by_number, uint8_t* codes) const {
    if (p.part.code != KVQ_INTEGER) return encode_floats(x, n, scale, zero, by_number, codes);
    const float most = float(p.top) + 0.5f, below = p.half_width + 0.5f;
    for (int i = 0; i < n; i++) {
      const float s = divisor(scale[i * by_number.value]), base = zero[i * by_number.value] - below * s;
      float steps = (x[i] - base) / s;
      steps = steps < 0.f ? 0.f : steps;
      steps = steps > most ? most : steps;
      codes[i] = uint8_t(int32_t(steps == steps ? steps : 0.f));  // of a group that is NaN
    }
  }

  template <class ByNumber>
  void encode_floats(const float* x, int n, const float* scale, const float* zero, ByNumber by_number, uint8_t* codes) const {
    for (int i = 0; i < n; i++) {
      float steps = (x[i] - zero[i * by_number.value]) / divisor(scale[i * by_number.value]);
      steps = steps < -p.half_width ? -p.half_width : steps;
      steps = steps > p.half_width ? p.half_width : steps;
      steps = steps == steps ? steps : 0.f;
      codes[i] = p.part.code == KVQ_E4M3 ? float_to_eight_bits<3, 120>(steps, 512.f) : float_to_eight_bits<2, 112>(steps, 65536.f);
    }
  }

  template <class ByNumber>
  void decode(const uint8_t* codes, int n, const float* scale, const float* zero, ByNumber by_number, float* x) const {
    const bool is_integer = p.part.code == KVQ_INTEGER;
    for (int i = 0; i < n; i++) {
      const float value = is_integer ? float(codes[i]) - p.half_width : value_of[codes[i]];
      x[i] = value * scale[i * by_number.value] + zero[i * by_number.value];
    }
  }
};
