// Products of packed codes with queries and weights in float32, register by register.

constexpr int kGroupOfRows = 4;  // rows whose products share one unpacking of the codes

// Calls f with the smaller of n and MOST as a compile-time constant.
template <int MOST, class F>
inline void with_constant(int n, F f) {
  if constexpr (MOST > 1)
    if (n < MOST) return with_constant<MOST - 1>(n, f);
  f(Int<MOST>());
}

// What is taken out of integer codes as they are read, near the middle of each grid: sums of codes of one sign would be
// large, and nearly cancel with the zero points.
template <int CODE, int BITS>
constexpr float kCentre = CODE == KVQ_INTEGER ? ((1 << BITS) - 1) * 0.5f : 0.f;

// Field f of byte e of every word, as the number its code stands for before its scale, less the centre.
template <int CODE, int BITS>
inline Vf decode(Vi words, int e, int f) {
  if (CODE == KVQ_INTEGER) return to_float((words >> (8 * e + BITS * f)) & ((1 << BITS) - 1)) - kCentre<CODE, BITS>;
  constexpr int kMantissa = CODE == KVQ_E4M3 ? 3 : 2, kBias = CODE == KVQ_E4M3 ? 120 : 112;
  constexpr float kStep = CODE == KVQ_E4M3 ? 0x1p-9f : 0x1p-16f;  // between subnormal codes
  const Vi byte = words >> (8 * e), magnitude = byte & 0x7f;
  const Vf normal = bits_of<Vf>((magnitude << (23 - kMantissa)) + (kBias << 23));
  const Vf x = magnitude < (1 << kMantissa) ? to_float(magnitude) * kStep : normal;
  return bits_of<Vf>(bits_of<Vi>(x) | ((byte & 0x80) << 24));
}

// scores[r][t] = sum over channels first..last-1 of q[r][d] * code(t, d), for 16 * (8 / BITS) tokens.
template <int CODE, int BITS, int ROWS>
inline void key_products(const uint8_t* words, const float* q, int q_stride, int first, int last, float* scores, int stride,
                         int64_t ahead) {
  constexpr int kFields = 8 / BITS;
  for (int lane = 0; lane < kWordLanes; lane += LANES) {
    Vf sum[ROWS][kFields] = {};
    for (int i = first / 4; i < last / 4; i++) {
      const uint8_t* at = words + 4 * (i * kWordLanes + lane);
      const Vi w = load_words(at);
      prefetch(at + ahead);
      each<4 * kFields>([&](auto n) KVQ_INLINED {
        constexpr int e = n / kFields, f = n % kFields;
        const Vf code = decode<CODE, BITS>(w, e, f);
        each<ROWS>([&](auto r) KVQ_INLINED { sum[r][f] += q[r * q_stride + 4 * i + e] * code; });
      });
    }
    each<ROWS * kFields>([&](auto n) KVQ_INLINED {
      constexpr int r = n / kFields, f = n % kFields;
      store(scores + r * stride + f * kWordLanes + lane, sum[r][f]);
    });
  }
}

// sum[r][f * field_stride + lane] = sum over tokens of p[r][t] * code(t, channel), for `lanes` of a column of `width` words.
template <int CODE, int BITS, int ROWS>
inline void value_products(const uint8_t* words, int width, int tokens, const float* p, int p_stride, float* sum,
                           int sum_stride, int field_stride, int lanes, int64_t ahead) {
  constexpr int kFields = 8 / BITS;
  Vf acc[ROWS][kFields] = {};
  for (int i = 0; i < tokens / 4; i++) {
    const uint8_t* at = words + int64_t(4) * i * width;
    const Vi w = load_words(at);
    prefetch(at + ahead);
    each<4 * kFields>([&](auto n) KVQ_INLINED {
      constexpr int e = n / kFields, f = n % kFields;
      const Vf code = decode<CODE, BITS>(w, e, f);
      each<ROWS>([&](auto r) KVQ_INLINED { acc[r][f] += p[r * p_stride + 4 * i + e] * code; });
    });
  }
  each<ROWS * kFields>([&](auto n) KVQ_INLINED {
    constexpr int r = n / kFields, f = n % kFields;
    memcpy(sum + r * sum_stride + f * field_stride, &acc[r][f], lanes * sizeof(float));
  });
}
