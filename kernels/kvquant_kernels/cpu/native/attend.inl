// Attention over packed pages and exact segments in float32 arithmetic, for one instruction set.
// Included by attend.cpp, which is compiled once for each; LANES is the number of floats in one of its registers.
//
// Layout of codes (layout.py): 32-bit words whose byte e belongs to channel 4i + e (keys) or token 4i + e (values), with
// 16 tokens (keys) or channels (values) side by side, so that unpacking and products need no horizontal sums. A byte holds
// 8 / bits fields; field f belongs to the f-th block of 16 tokens, or of dim / fields channels.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kvq.h"

namespace {

typedef float Vf __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Vi __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

constexpr int kMostRows = 16;   // query rows of one task
constexpr int kMostGroups = 64; // groups of channels that vnni.inl takes
constexpr int kGroupOfRows = 4;  // rows whose products share one unpacking of the codes
constexpr int kWordLanes = 16;
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

inline Vf load(const float* p) { return *(const Vf*)p; }
inline void store(float* p, Vf x) { *(Vf*)p = x; }
inline Vi load_words(const uint8_t* p) { return *(const Vi*)p; }
// Into the second-level cache: the first-level one holds what is being computed on.
inline void prefetch(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

inline Vf to_float(Vi x) { return __builtin_convertvector(x, Vf); }
template <class To, class From>
inline To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

inline float half_to_float(uint16_t half) {
  const uint32_t magnitude = uint32_t(half & 0x7fff) << 13, sign = uint32_t(half & 0x8000) << 16;
  const bool is_special = (half & 0x7c00) == 0x7c00;  // infinity or NaN
  const float x = is_special ? bits_of<float>(magnitude | 0x7f800000u) : bits_of<float>(magnitude) * 0x1p112f;
  return bits_of<float>(bits_of<uint32_t>(x) | sign);
}

void halves_to_floats(const uint8_t* from, float* to, int n) {
  for (int i = 0; i < n; i++) {
    uint16_t half;
    memcpy(&half, from + 2 * i, 2);
    to[i] = half_to_float(half);
  }
}

// Field f of byte e of every word, as the number its code stands for before scale and middle.
template <int CODE, int BITS>
inline Vf decode(Vi words, int e, int f) {
  if (CODE == KVQ_INTEGER) return to_float((words >> (8 * e + BITS * f)) & ((1 << BITS) - 1));
  const Vi byte = words >> (8 * e);
  const int shift = CODE == KVQ_E4M3 ? 20 : 21;
  const float bias = CODE == KVQ_E4M3 ? 0x1p120f : 0x1p112f;
  return bits_of<Vf>(((byte & 0x7f) << shift) | ((byte & 0x80) << 24)) * bias;
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
      for (int e = 0; e < 4; e++)
        for (int f = 0; f < kFields; f++) {
          const Vf code = decode<CODE, BITS>(w, e, f);
          for (int r = 0; r < ROWS; r++) sum[r][f] += q[r * q_stride + 4 * i + e] * code;
        }
    }
    for (int r = 0; r < ROWS; r++)
      for (int f = 0; f < kFields; f++) store(scores + r * stride + f * kWordLanes + lane, sum[r][f]);
  }
}

// sum[r][f][lane] += sum over tokens of p[f][r][t] * code(t, channel), for `lanes` channels of every field.
template <int CODE, int BITS, int ROWS>
inline void value_products(const uint8_t* words, int words_per_row, int tokens, const float* const* p, int p_stride,
                           float* const* sum, int sum_stride, int lanes, int64_t ahead) {
  constexpr int kFields = 8 / BITS;
  Vf acc[ROWS][kFields];
  for (int r = 0; r < ROWS; r++)
    for (int f = 0; f < kFields; f++) acc[r][f] = load(sum[f] + r * sum_stride);
  for (int i = 0; i < tokens / 4; i++) {
    const uint8_t* at = words + int64_t(4) * i * words_per_row;
    const Vi w = load_words(at);
    prefetch(at + ahead);
    for (int e = 0; e < 4; e++)
      for (int f = 0; f < kFields; f++) {
        const Vf code = decode<CODE, BITS>(w, e, f);
        for (int r = 0; r < ROWS; r++) acc[r][f] += p[f][r * p_stride + 4 * i + e] * code;
      }
  }
  for (int r = 0; r < ROWS; r++)
    for (int f = 0; f < kFields; f++) memcpy(sum[f] + r * sum_stride, &acc[r][f], lanes * sizeof(float));
}

// 2 ** x with x <= 0 up to rounding; exactly 0 below -126, NaN for NaN.
inline Vf exp2_nonpositive(Vf x) {
  const Vf zero = {}, least = zero - 126.f;
  const Vf clamped = x < least ? least : x;
  const Vf shifted = clamped + 12582912.f;  // 1.5 * 2^23: the low mantissa bits now hold the rounded integer
  const Vi n = bits_of<Vi>(shifted) - 0x4b400000;
  const Vf f = clamped - (shifted - 12582912.f);
  Vf p = f * 1.535336188319500e-4f + 1.339887440266574e-3f;
  p = p * f + 9.618437357674640e-3f;
  p = p * f + 5.550332471162809e-2f;
  p = p * f + 2.402264791363012e-1f;
  p = p * f + 6.931472028550421e-1f;
  p = p * f + 1.0f;
  return x < least ? zero : p * bits_of<Vf>((n + 127) << 23);
}

inline float exp2_nonpositive(float x) {
  const Vf zero = {};
  return exp2_nonpositive(zero + x)[0];
}

inline float sum_of(Vf x) {
  float total = 0.f;
  for (int j = 0; j < LANES; j++) total += x[j];
  return total;
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

// Butterflies of distance 1, 2, 4, ... over blocks of the largest power of two that divides dim, as rotation.py defines.
void rotate(float* x, int dim) {
  const int block = dim & -dim;
  for (int first = 0; first < dim; first += block)
    for (int distance = 1; distance < block; distance *= 2)
      for (int i = first; i < first + block; i += 2 * distance)
        for (int j = i; j < i + distance; j++) {
          const float a = x[j], b = x[j + distance];
          x[j] = a + b;
          x[j + distance] = a - b;
        }
  const float scale = float(1.0 / std::sqrt(double(block)));
  for (int i = 0; i < dim; i++) x[i] *= scale;
}

#if KVQ_VNNI
#include "vnni.inl"
#endif

inline int align16(int n) { return (n + 15) & ~15; }

// One task's running softmax over rows first_row..: its state and the scratch of one block of tokens.
struct Task {
  const KvqAttend& a;
  int64_t b, h;
  int first_row, rows, tokens_at_most;
  int fields, words_per_row, value_lanes, groups;
  std::vector<float> memory;
  float *query, *rotated_query, *folded, *offset;  // [rows][dim] three times, [rows]
  float *scores, *weights;                         // [rows][tokens], [groups][rows][tokens]
  float *max, *sum, *plain, *packed, *bias, *page; // running: [rows] twice, [rows][value dim], fields, group biases
  float *scales, *zeros;                           // of one page, in float32
  bool integer_keys = false, integer_values = false;  // whether products are those of vnni.inl
  int64_t ahead = 0;  // bytes from the current page to the next: loops fetch there what they read here
  std::vector<uint8_t> bytes;                         // what vnni.inl rounds queries and weights to

  Task(const KvqAttend& args, int64_t batch, int64_t head, int row, int count)
      : a(args), b(batch), h(head), first_row(row), rows(count) {
    tokens_at_most = std::max(align16(a.page_size), 128);
    fields = 8 / a.value.bits;
    words_per_row = a.value.dim / fields;
    value_lanes = align16(words_per_row);
    groups = a.value.per_channel ? 1 : a.value.dim / a.value.group;
    const int dim = align16(a.key.dim), value_dim = align16(a.value.dim);
    const int key_scales = a.key.per_channel ? dim : a.key.dim / a.key.group * a.page_size;
    const int value_scales = a.value.per_channel ? value_dim : groups * a.page_size;
    const int scale_room = align16(std::max(key_scales, value_scales));
    int64_t total = 0;
    auto reserve = [&](int64_t n) { int64_t at = total; total += (n + 15) / 16 * 16; return at; };
    const int64_t at[] = {reserve(int64_t(rows) * dim), reserve(int64_t(rows) * dim), reserve(int64_t(rows) * dim), reserve(rows),
                          reserve(int64_t(rows) * tokens_at_most), reserve(int64_t(groups) * rows * tokens_at_most),
                          reserve(rows), reserve(rows), reserve(int64_t(rows) * value_dim),
                          reserve(int64_t(rows) * fields * value_lanes), reserve(int64_t(rows) * groups),
                          reserve(int64_t(rows) * fields * value_lanes), reserve(scale_room), reserve(scale_room)};
    memory.assign(total, 0.f);
    float** const to[] = {&query, &rotated_query, &folded, &offset, &scores, &weights, &max,
                          &sum, &plain, &packed, &bias, &page, &scales, &zeros};
    for (int i = 0; i < 14; i++) *to[i] = memory.data() + at[i];
    query_stride = dim;
    plain_stride = value_dim;
    load_query();
#if KVQ_VNNI
    integer_keys = !a.exact && a.key.code == KVQ_INTEGER && a.key.per_channel;
    integer_values = !a.exact && a.value.code == KVQ_INTEGER && !a.value.per_channel;
    bytes.resize(std::max(2 * int64_t(rows) * query_stride, 2 * int64_t(groups) * rows * tokens_at_most));
#endif
  }

  int query_stride, plain_stride;

  void load_query() {
    const int dim = a.key.dim;
    for (int r = 0; r < rows; r++) {
      const float* from = a.query + ((b * a.heads + h) * a.rows + first_row + r) * dim;
      float* q = query + r * query_stride;
      for (int d = 0; d < dim; d++) q[d] = from[d] * kLog2e;
      memcpy(rotated_query + r * query_stride, q, dim * sizeof(float));
      if (a.key.rotated) rotate(rotated_query + r * query_stride, dim);
      max[r] = kMinusInf;
    }
  }

  void add_sink_logits() {
    for (int r = 0; r < rows && a.sink_logits; r++) {
      max[r] = a.sink_logits[h * a.rows + first_row + r] * kLog2e;
      sum[r] = 1.f;
    }
  }

  // Softcap and mask, then weights relative to the running maximum: scores become weights. Returns false if every score
  // of every row is -inf, so that there is nothing to add.
  bool softmax(int tokens, int64_t column) {
    bool any = false;
    for (int r = 0; r < rows; r++) {
      float* s = scores + r * tokens_at_most;
      if (a.softcap > 0.f) {
        const float cap = a.softcap * kLog2e;
        for (int t = 0; t < tokens; t++) s[t] = cap * std::tanh(s[t] / cap);
      }
      if (a.mask) {
        const float* m = a.mask + b * a.mask_stride[0] + h * a.mask_stride[1] + (first_row + r) * a.mask_stride[2] + column;
        for (int t = 0; t < tokens; t++) s[t] += m[t] * kLog2e;
      }
      const int padded = align16(tokens);
      std::fill(s + tokens, s + padded, kMinusInf);
      const float top = std::max(max[r], largest(s, padded));
      if (top == kMinusInf && !has_nan(s, padded)) {
        std::fill_n(s, padded, 0.f);
        continue;
      }
      any = true;
      rescale(r, top);
      Vf total = {};
      for (int t = 0; t < padded; t += LANES) {
        const Vf weight = exp2_nonpositive(load(s + t) - max[r]);
        store(s + t, weight);
        total += weight;
      }
      sum[r] += sum_of(total);
    }
    return any;
  }

  // The largest of n numbers, n a multiple of 16, NaN left aside.
  static float largest(const float* x, int n) {
    Vf top = load(x);
    for (int t = 0; t < n; t += LANES) top = load(x + t) > top ? load(x + t) : top;
    float best = kMinusInf;
    for (int j = 0; j < LANES; j++) best = top[j] > best ? top[j] : best;
    return best;
  }

  static bool has_nan(const float* x, int n) {
    bool found = false;
    for (int t = 0; t < n; t++) found |= x[t] != x[t];
    return found;
  }

  void rescale(int r, float top) {
    if (!(top > max[r])) return;
    const float keep = max[r] == kMinusInf ? 0.f : exp2_nonpositive(max[r] - top);
    max[r] = top;
    sum[r] *= keep;
    for (int d = 0; d < a.value.dim; d++) plain[r * plain_stride + d] *= keep;
    for (int d = 0; d < fields * value_lanes; d++) packed[r * fields * value_lanes + d] *= keep;
    for (int g = 0; g < groups; g++) bias[r * groups + g] *= keep;
  }

  template <class LoadRow>
  void exact(const KvqSegment& s, LoadRow load_row) {
    const int count = s.count[b];
    std::vector<float> row(std::max(align16(a.key.dim), align16(a.value.dim)));
    for (int first = 0; first < count; first += tokens_at_most) {
      const int tokens = std::min(tokens_at_most, count - first);
      const int64_t token = s.first[b] + first;
      for (int t = 0; t < tokens; t++) {
        load_row(s.key, b * s.key_stride[0] + h * s.key_stride[1] + (token + t) * s.key_stride[2], a.key.dim, row.data());
        for (int r = 0; r < rows; r++) scores[r * tokens_at_most + t] = dot(query + r * query_stride, row.data(), a.key.dim);
      }
      if (!softmax(tokens, s.column[b] + first)) continue;
      for (int t = 0; t < tokens; t++) {
        load_row(s.value, b * s.value_stride[0] + h * s.value_stride[1] + (token + t) * s.value_stride[2], a.value.dim, row.data());
        for (int r = 0; r < rows; r++) {
          const float p = scores[r * tokens_at_most + t];
          float* out = plain + r * plain_stride;
          for (int d = 0; d < a.value.dim; d++) out[d] += p * row[d];
        }
      }
    }
  }

  void load_scales(const KvqPart& part, const uint8_t* record) {
    const int n = part.per_channel ? part.dim : part.dim / part.group * a.page_size;
    for (const uint8_t* p = record + part.scales; p < record + part.head_stride; p += 64) prefetch(p + ahead);
    halves_to_floats(record + part.scales, scales, n);
    if (part.zeros >= 0) halves_to_floats(record + part.zeros, zeros, n);
    // From here on zeros holds what code 0 stands for.
    for (int i = 0; i < n; i++) zeros[i] = (part.zeros >= 0 ? zeros[i] : 0.f) - scales[i] * part.middle;
  }

  template <int CODE, int BITS>
  void key_scores(const uint8_t* record) {
    load_scales(a.key, record);
    if (a.key.per_channel) {
      fold_channel_scales();
#if KVQ_VNNI
      if constexpr (CODE == KVQ_INTEGER)
        if (integer_keys) return integer_key_scores<BITS>(record);
#endif
      for (int r = 0; r < rows; r++)
        for (int t = 0; t < a.page_size; t++) scores[r * tokens_at_most + t] = offset[r];
      add_products<CODE, BITS>(record, folded, 0, a.key.dim, nullptr);
      return;
    }
    for (int r = 0; r < rows; r++) std::fill_n(scores + r * tokens_at_most, a.page_size, 0.f);
    for (int g = 0; g < a.key.dim / a.key.group; g++) {
      const int first = g * a.key.group;
      for (int r = 0; r < rows; r++) {
        const float total = sum_of(rotated_query + r * query_stride + first, a.key.group);
        for (int t = 0; t < a.page_size; t++) scores[r * tokens_at_most + t] += total * zeros[g * a.page_size + t];
      }
      add_products<CODE, BITS>(record, rotated_query, first, first + a.key.group, scales + g * a.page_size);
    }
  }

  void fold_channel_scales() {
    for (int r = 0; r < rows; r++) {
      const float* q = rotated_query + r * query_stride;
      for (int d = 0; d < a.key.dim; d++) folded[r * query_stride + d] = q[d] * scales[d];
      offset[r] = dot(q, zeros, a.key.dim);
    }
  }

  // Adds q . codes of channels first..last-1 to the scores, times a scale per token if there is one.
  template <int CODE, int BITS>
  void add_products(const uint8_t* record, const float* q, int first, int last, const float* token_scales) {
    constexpr int kTokens = kWordLanes * 8 / BITS;
    float block[kGroupOfRows * kTokens];
    const int words = a.key.dim / 4 * kWordLanes * 4;  // bytes of a block of tokens
    for (int t = 0; t < a.page_size; t += kTokens, record += words)
      for (int r = 0; r < rows; r += kGroupOfRows) {
        const int count = std::min(kGroupOfRows, rows - r);
        const float* from = q + r * query_stride;
        switch (count) {
          case 1: key_products<CODE, BITS, 1>(record, from, query_stride, first, last, block, kTokens, r ? 0 : ahead); break;
          case 2: key_products<CODE, BITS, 2>(record, from, query_stride, first, last, block, kTokens, r ? 0 : ahead); break;
          case 3: key_products<CODE, BITS, 3>(record, from, query_stride, first, last, block, kTokens, r ? 0 : ahead); break;
          default: key_products<CODE, BITS, 4>(record, from, query_stride, first, last, block, kTokens, r ? 0 : ahead);
        }
        for (int i = 0; i < count; i++) {
          float* s = scores + (r + i) * tokens_at_most + t;
          const float* product = block + i * kTokens;
          if (token_scales)
            for (int j = 0; j < kTokens; j++) s[j] += product[j] * token_scales[t + j];
          else
            for (int j = 0; j < kTokens; j++) s[j] += product[j];
        }
      }
  }

  template <int CODE, int BITS>
  void add_values(const uint8_t* record) {
    load_scales(a.value, record);
#if KVQ_VNNI
    if constexpr (CODE == KVQ_INTEGER)
      if (integer_values) return add_integer_values<BITS>(record);
#endif
    fold_token_scales();
    float* const target = a.value.per_channel ? page : packed;
    if (a.value.per_channel) std::fill_n(page, rows * fields * value_lanes, 0.f);
    const int segment = a.value.per_channel ? words_per_row : std::min(words_per_row, a.value.group);
    for (int first = 0; first < words_per_row; first += segment)
      for (int w = first; w < first + segment; w += LANES)
        add_lanes<CODE, BITS>(record, target, w, std::min(LANES, first + segment - w));
    if (a.value.per_channel) add_channel_scaled();
  }

  template <int CODE, int BITS>
  void add_lanes(const uint8_t* record, float* target, int w, int lanes) {
    constexpr int kFields = 8 / BITS;
    const int stride = fields * value_lanes;
    for (int r = 0; r < rows; r += kGroupOfRows) {
      const float* p[kFields];
      float* sum_of[kFields];
      for (int f = 0; f < kFields; f++) {
        const int group = a.value.per_channel ? 0 : (f * words_per_row + w) / a.value.group;
        p[f] = weights + (int64_t(group) * rows + r) * tokens_at_most;
        sum_of[f] = target + r * stride + f * value_lanes + w;
      }
      const uint8_t* words = record + 4 * w;
      switch (std::min(kGroupOfRows, rows - r)) {
        case 1: value_products<CODE, BITS, 1>(words, words_per_row, a.page_size, p, tokens_at_most, sum_of, stride, lanes, r ? 0 : ahead); break;
        case 2: value_products<CODE, BITS, 2>(words, words_per_row, a.page_size, p, tokens_at_most, sum_of, stride, lanes, r ? 0 : ahead); break;
        case 3: value_products<CODE, BITS, 3>(words, words_per_row, a.page_size, p, tokens_at_most, sum_of, stride, lanes, r ? 0 : ahead); break;
        default: value_products<CODE, BITS, 4>(words, words_per_row, a.page_size, p, tokens_at_most, sum_of, stride, lanes, r ? 0 : ahead);
      }
    }
  }

  void fold_token_scales() {
    for (int g = 0; g < groups; g++)
      for (int r = 0; r < rows; r++) {
        const float* p = scores + r * tokens_at_most;
        float* w = weights + (int64_t(g) * rows + r) * tokens_at_most;
        if (a.value.per_channel) {
          memcpy(w, p, a.page_size * sizeof(float));
          continue;
        }
        const float *scale = scales + g * a.page_size, *zero = zeros + g * a.page_size;
        for (int t = 0; t < a.page_size; t++) w[t] = p[t] * scale[t];
        bias[r * groups + g] += dot(p, zero, a.page_size);
      }
  }

  void add_channel_scaled() {
    const int stride = fields * value_lanes;
    for (int r = 0; r < rows; r++) {
      const float total = sum_of(scores + r * tokens_at_most, a.page_size);
      for (int f = 0; f < fields; f++)
        for (int w = 0; w < words_per_row; w++) {
          const int d = f * words_per_row + w, at = r * stride + f * value_lanes + w;
          packed[at] += page[at] * scales[d] + total * zeros[d];
        }
    }
  }

#if KVQ_VNNI
  // Rows that share one unpacking, as many as leave room for their sums in the registers.
  template <int BITS>
  static constexpr int rows_at_once() {
    return BITS == 2 ? 2 : kGroupOfRows;
  }

  template <int BITS>
  void integer_key_scores(const uint8_t* record) {
    constexpr int kTokens = kWordLanes * 8 / BITS;
    RoundedQuery q[kMostRows];
    for (int r = 0; r < rows; r++) {
      q[r].high = (int8_t*)bytes.data() + 2 * r * query_stride;
      q[r].low = q[r].high + query_stride;
      int64_t total;
      q[r].step = round_query(folded + r * query_stride, a.key.dim, q[r].high, q[r].low, &total);
      // offset[r] takes the middle out of every code with the exact query; here the rounded one has to do it.
      const float exact_middle = a.key.middle * sum_of(folded + r * query_stride, a.key.dim);
      q[r].offset = offset[r] + exact_middle - a.key.middle * q[r].step * float(total);
    }
    const int block = a.key.dim / 4 * kWordLanes * 4;
    for (int t = 0; t < a.page_size; t += kTokens, record += block) {
      for (int r = 0; r < rows; r += rows_at_once<BITS>()) {
        float* to = scores + r * tokens_at_most + t;
        switch (std::min(rows_at_once<BITS>(), rows - r)) {
          case 1: vnni_key_products<BITS, 1>(record, q + r, a.key.dim, to, tokens_at_most, r ? 0 : ahead); break;
          case 2: vnni_key_products<BITS, 2>(record, q + r, a.key.dim, to, tokens_at_most, r ? 0 : ahead); break;
          case 3: vnni_key_products<BITS, 3>(record, q + r, a.key.dim, to, tokens_at_most, r ? 0 : ahead); break;
          default: vnni_key_products<BITS, rows_at_once<BITS>()>(record, q + r, a.key.dim, to, tokens_at_most, r ? 0 : ahead);
        }
      }
    }
  }

  template <int BITS>
  void add_integer_values(const uint8_t* record) {
    constexpr int kFields = 8 / BITS, kRows = rows_at_once<BITS>();
    float step[kMostGroups * kMostRows];
    uint8_t *high = bytes.data(), *low = high + int64_t(groups) * rows * tokens_at_most;
    round_page_weights<BITS>(step, high, low);
    const int stride = fields * value_lanes, segment = std::min(words_per_row, a.value.group);
    for (int w = 0; w < words_per_row;) {
      const int lanes = std::min(kWordLanes, segment - w % segment);
      for (int r = 0; r < rows; r += kRows) {
        const uint8_t *h[kFields], *l[kFields];
        const float* s[kFields];
        float* to[kFields];
        for (int f = 0; f < kFields; f++) {
          const int64_t at = int64_t((f * words_per_row + w) / a.value.group) * rows + r;
          h[f] = high + at * tokens_at_most;
          l[f] = low + at * tokens_at_most;
          s[f] = step + at;
          to[f] = packed + r * stride + f * value_lanes + w;
        }
        const uint8_t* words = record + 4 * w;
        switch (std::min(kRows, rows - r)) {
          case 1: vnni_value_products<BITS, 1>(words, words_per_row, a.page_size, h, l, tokens_at_most, s, to, stride, lanes, r ? 0 : ahead); break;
          case 2: vnni_value_products<BITS, 2>(words, words_per_row, a.page_size, h, l, tokens_at_most, s, to, stride, lanes, r ? 0 : ahead); break;
          case 3: vnni_value_products<BITS, 3>(words, words_per_row, a.page_size, h, l, tokens_at_most, s, to, stride, lanes, r ? 0 : ahead); break;
          default: vnni_value_products<BITS, kRows>(words, words_per_row, a.page_size, h, l, tokens_at_most, s, to, stride, lanes, r ? 0 : ahead);
        }
      }
      w += lanes;
    }
  }

  // Folds scales into weights and rounds them; the middle of the codes leaves through the biases.
  template <int BITS>
  void round_page_weights(float* step, uint8_t* high, uint8_t* low) {
    const float middle = a.value.middle - (BITS == 8 ? 128.f : 0.f);
    for (int g = 0; g < groups; g++) {
      const float *scale = scales + g * a.page_size, *zero = zeros + g * a.page_size;
      for (int r = 0; r < rows; r++) {
        const int64_t at = int64_t(g) * rows + r;
        const float* p = scores + r * tokens_at_most;
        float* w = weights + at * tokens_at_most;
        for (int t = 0; t < a.page_size; t++) w[t] = p[t] * scale[t];
        int64_t total;
        step[at] = round_weights(w, a.page_size, high + at * tokens_at_most, low + at * tokens_at_most, &total);
        const float exact_middle = a.value.middle * sum_of(w, a.page_size);
        bias[r * groups + g] += dot(p, zero, a.page_size) + exact_middle - middle * step[at] * float(total);
      }
    }
  }
#endif

  void pages(int first, int last) {
    for (int p = first; p < last; p++) {
      const uint8_t* record = a.pool + a.page_bytes * a.table[b * a.table_stride + p];
      const uint8_t *key = record + a.key.first + h * a.key.head_stride, *value = record + a.value.first + h * a.value.head_stride;
      ahead = p + 1 < last ? a.page_bytes * (a.table[b * a.table_stride + p + 1] - int64_t(a.table[b * a.table_stride + p])) : 0;
      by_format(a.key, [&](auto code, auto bits) { key_scores<code.value, bits.value>(key); });
      if (softmax(a.page_size, a.page_column[b] + int64_t(p) * a.page_size))
        by_format(a.value, [&](auto code, auto bits) { add_values<code.value, bits.value>(value); });
    }
  }

  template <class F>
  static void by_format(const KvqPart& part, F f) {
    using std::integral_constant;
    if (part.code == KVQ_E4M3) return f(integral_constant<int, KVQ_E4M3>(), integral_constant<int, 8>());
    if (part.code == KVQ_E5M2) return f(integral_constant<int, KVQ_E5M2>(), integral_constant<int, 8>());
    if (part.bits == 8) return f(integral_constant<int, KVQ_INTEGER>(), integral_constant<int, 8>());
    if (part.bits == 4) return f(integral_constant<int, KVQ_INTEGER>(), integral_constant<int, 4>());
    return f(integral_constant<int, KVQ_INTEGER>(), integral_constant<int, 2>());
  }

  // [rows][2 + 2 * value dim]: maximum, sum, exact part, part in the basis of the pages.
  void write(float* out) const {
    const int dim = a.value.dim;
    for (int r = 0; r < rows; r++, out += 2 + 2 * dim) {
      out[0] = max[r];
      out[1] = sum[r];
      memcpy(out + 2, plain + r * plain_stride, dim * sizeof(float));
      for (int d = 0; d < dim; d++) {
        const int f = d / words_per_row, w = d % words_per_row;
        const float from_zeros = a.value.per_channel ? 0.f : bias[r * groups + d / a.value.group];
        out[2 + dim + d] = packed[(r * fields + f) * value_lanes + w] + from_zeros;
      }
    }
  }
};

void load_f32(const void* from, int64_t at, int n, float* to) { memcpy(to, (const float*)from + at, n * sizeof(float)); }

void load_bf16(const void* from, int64_t at, int n, float* to) {
  const uint16_t* x = (const uint16_t*)from + at;
  for (int i = 0; i < n; i++) to[i] = bits_of<float>(uint32_t(x[i]) << 16);
}

void load_f16(const void* from, int64_t at, int n, float* to) { halves_to_floats((const uint8_t*)((const uint16_t*)from + at), to, n); }

void add_exact(Task& task, const KvqAttend& a) {
  for (int i = 0; i < a.num_segments; i++) {
    const KvqSegment& s = a.segment[i];
    if (a.dtype == KVQ_F32) task.exact(s, load_f32);
    else if (a.dtype == KVQ_BF16) task.exact(s, load_bf16);
    else task.exact(s, load_f16);
  }
}

// Merges the partial results of one row's splits into its output.
void merge(const KvqAttend& a, const float* partial, int64_t split_stride, int splits, float* out) {
  const int dim = a.value.dim;
  float top = kMinusInf, total = 0.f;
  for (int s = 0; s < splits; s++) top = std::max(top, partial[s * split_stride]);
  std::vector<float> plain(dim, 0.f), packed(dim, 0.f);
  for (int s = 0; s < splits; s++) {
    const float* x = partial + s * split_stride;
    const float keep = x[0] == kMinusInf ? 0.f : exp2_nonpositive(x[0] - top);
    total += x[1] * keep;
    for (int d = 0; d < dim; d++) plain[d] += x[2 + d] * keep;
    for (int d = 0; d < dim; d++) packed[d] += x[2 + dim + d] * keep;
  }
  if (a.value.rotated) rotate(packed.data(), dim);
  for (int d = 0; d < dim; d++) out[d] = total == 0.f ? 0.f : (plain[d] + packed[d]) / total;
}

}  // namespace

#define KVQ_PASTE2(a, b) a##b
#define KVQ_PASTE(a, b) KVQ_PASTE2(a, b)
#define KVQ_NAME(name) KVQ_PASTE(name, KVQ_VARIANT)

void KVQ_NAME(kvq_attend_)(const KvqAttend& a) {
  const int row_blocks = (a.rows + kMostRows - 1) / kMostRows;
  const int64_t heads = int64_t(a.batch) * a.heads * row_blocks;
  int most_pages = 1;
  for (int b = 0; b < a.batch; b++) most_pages = std::max(most_pages, a.num_pages[b]);
  const int wanted = a.num_threads > 1 ? int((8 * a.num_threads + heads - 1) / heads) : 1;
  const int splits = std::max(1, std::min(wanted, most_pages / 4));
  const int64_t row_size = 2 + 2 * a.value.dim, block_size = kMostRows * row_size;
  std::vector<float> partial(heads * splits * block_size);
#pragma omp parallel for schedule(dynamic) num_threads(a.num_threads)
  for (int64_t i = 0; i < heads * splits; i++) {
    const int64_t head = i / splits, split = i % splits;
    const int64_t block = head % row_blocks, h = head / row_blocks % a.heads, b = head / row_blocks / a.heads;
    const int first = int(block) * kMostRows;
    Task task(a, b, h, first, std::min(kMostRows, a.rows - first));
    if (split == 0) {
      task.add_sink_logits();
      add_exact(task, a);
    }
    const int64_t pages = a.num_pages[b];
    task.pages(int(pages * split / splits), int(pages * (split + 1) / splits));
    task.write(partial.data() + i * block_size);
  }
#pragma omp parallel for num_threads(a.num_threads)
  for (int64_t head = 0; head < heads; head++) {
    const int64_t block = head % row_blocks, bh = head / row_blocks;
    for (int r = 0; r < std::min(kMostRows, a.rows - int(block) * kMostRows); r++)
      merge(a, partial.data() + head * splits * block_size + r * row_size, block_size, splits,
            a.out + (bh * a.rows + block * kMostRows + r) * a.value.dim);
  }
}
