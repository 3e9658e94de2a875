// Pages from tensors and back: rotate, find scales, round and pack; unpack, scale and rotate back. Step by step what
// kvquant/codec.py defines, with the same roundings in the same order. Where the codes lie is in layout.py.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "kvq.h"
#include "names.inl"

namespace {

#include "simd.inl"

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

#include "grid.inl"

// One head's part of one page, as numbers.
struct Block {
  const KvqPages& p;
  const int tokens, dim, num_groups, group_size;
  std::vector<float> values, error, low, high, scale, zero, best_scale, best_zero, best_error;
  std::vector<uint8_t> codes;

  explicit Block(const KvqPages& pages)
      : p(pages), tokens(p.page_size), dim(p.part.dim), num_groups(p.part.per_channel ? dim : tokens * (dim / p.part.group)),
        group_size(p.part.per_channel ? tokens : p.part.group), values(int64_t(tokens) * dim), low(num_groups), high(num_groups),
        scale(num_groups), zero(num_groups), codes(int64_t(tokens) * dim) {}

  // Calls f(first number, how many of them, their first group, whether each is in a group of its own) for runs of numbers.
  template <class F>
  void runs(F f) const {
    for (int t = 0; t < tokens; t++) {
      if (p.part.per_channel) f(int64_t(t) * dim, dim, 0, Int<1>());
      for (int d = 0; d < dim && !p.part.per_channel; d += group_size)
        f(int64_t(t) * dim + d, group_size, (int64_t(t) * dim + d) / group_size, Int<0>());
    }
  }

  // The least and the largest number of every group; NaN if one of them is not finite.
  void find_ranges() {
    const float infinity = std::numeric_limits<float>::infinity();
    std::fill(low.begin(), low.end(), infinity);
    std::fill(high.begin(), high.end(), -infinity);
    runs([&](int64_t first, int n, int64_t g, auto by_number) {
      if (by_number.value)
        widen_each(values.data() + first, n, low.data(), high.data());
      else
        widen(values.data() + first, n, &low[g], &high[g]);
    });
  }

  static void widen_each(const float* x, int n, float* __restrict low, float* __restrict high) {
    for (int i = 0; i < n; i++) {
      const float bad = x[i] * 0.f, least = x[i] < low[i] ? x[i] : low[i], most = x[i] > high[i] ? x[i] : high[i];
      low[i] = bad == 0.f ? least : kNaN;
      high[i] = bad == 0.f ? most : kNaN;
    }
  }

  static void widen(const float* x, int n, float* low, float* high) {
    const Vf zero = {};
    Vf least = zero + *low, most = zero + *high, bad = zero;
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
      const Vf y = load(x + i);
      least = y < least ? y : least;
      most = y > most ? y : most;
      bad += y * 0.f;
    }
    float a = -max_of(-least), b = max_of(most), c = sum_of(bad);
    for (; i < n; i++) {
      a = x[i] < a ? x[i] : a;
      b = x[i] > b ? x[i] : b;
      c += x[i] * 0.f;
    }
    *low = c == 0.f ? a : kNaN;
    *high = c == 0.f ? b : kNaN;
  }

  // Scale and zero point of the grid that covers each group's range, less what `shrink` cuts off: a part of its width at
  // both ends, or a factor for symmetric formats. NaN where float16 cannot say it.
  void fit(float shrink, bool is_whole) {
    for (int g = 0; g < num_groups; g++) {
      const float cut = (high[g] - low[g]) * shrink;
      const float a = is_whole ? low[g] : is_symmetric() ? low[g] * shrink : low[g] + cut;
      const float b = is_whole ? high[g] : is_symmetric() ? high[g] * shrink : high[g] - cut;
      const float middle = is_symmetric() ? 0.f : half_to_float(float_to_half(a * 0.5f + b * 0.5f));
      const float up = b - middle, down = middle - a;
      const float step = round_up_to_half((up > down || up != up ? up : down) / p.half_width);
      const bool is_bad = !(std::isfinite(step) && std::isfinite(middle) && std::isfinite(a) && std::isfinite(b));
      scale[g] = is_bad ? kNaN : step;
      zero[g] = is_bad ? kNaN : middle;
    }
  }

  bool is_symmetric() const { return p.part.zeros < 0; }

  void encode() {
    const Grid grid(p);
    runs([&](int64_t first, int n, int64_t g, auto by_number) {
      grid.encode(values.data() + first, n, scale.data() + g, zero.data() + g, by_number, codes.data() + first);
    });
  }

  void quantize() {
    find_ranges();
    if (p.num_shrinks)
      search_clip();
    else
      fit(0.f, true);
    encode();
  }

  // The range of the least error per group.
  void search_clip() {
    best_scale.assign(num_groups, 0.f);
    best_zero.assign(num_groups, 0.f);
    best_error.assign(num_groups, std::numeric_limits<float>::infinity());
    error.resize(values.size());
    for (int i = 0; i < p.num_shrinks; i++) {
      fit(p.shrink[i], false);
      encode();
      measure_error();
      for (int g = 0; g < num_groups; g++) {
        const float total = error[p.part.per_channel ? g : int64_t(g) * group_size];
        const bool is_better = total < best_error[g];
        best_scale[g] = is_better ? scale[g] : best_scale[g];
        best_zero[g] = is_better ? zero[g] : best_zero[g];
        best_error[g] = is_better ? total : best_error[g];
      }
    }
    fit(0.f, true);  // the whole range counts: clipping must not make a bad group look good
    for (int g = 0; g < num_groups; g++) scale[g] = scale[g] != scale[g] ? kNaN : best_scale[g];
    zero = best_zero;
  }

  // Leaves the sum of |error| ** norm of every group in its first number.
  void measure_error() {
    const Grid grid(p);
    runs([&](int64_t first, int n, int64_t g, auto by_number) {
      float* to = error.data() + first;
      grid.decode(codes.data() + first, n, scale.data() + g, zero.data() + g, by_number, to);
      for (int i = 0; i < n; i++) {
        const float residue = to[i] - values[first + i], square = residue * residue;
        to[i] = p.norm == 4 ? square * square : square;
      }
    });
    if (p.part.per_channel) return add_halves(error.data(), tokens, dim);
    for (int g = 0; g < num_groups; g++) add_halves(error.data() + int64_t(g) * group_size, group_size, 1);
  }

  // Adds the second half of n rows of numbers to the first until one is left; that of an odd number in the middle waits.
  static void add_halves(float* x, int n, int width) {
    for (; n > 1; n -= n / 2) {
      const int64_t count = int64_t(n / 2) * width;
      const float* second = x + int64_t(n - n / 2) * width;
      for (int64_t i = 0; i < count; i++) x[i] += second[i];
    }
  }

  void dequantize() {
    const Grid grid(p);
    runs([&](int64_t first, int n, int64_t g, auto by_number) {
      grid.decode(codes.data() + first, n, scale.data() + g, zero.data() + g, by_number, values.data() + first);
    });
  }
};

#include "words.inl"

template <class F>
void for_each_block(const KvqPages& p, F f) {
  const int64_t count = int64_t(p.pages) * p.heads;
#pragma omp parallel num_threads(p.num_threads)
  {
    Block block(p);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < count; i++) {
      const int64_t head = i % p.heads, page = i / p.heads;
      uint8_t* record = p.records + page * p.page_bytes + p.part.first + head * p.part.head_stride;
      f(block, record, page * p.stride[0] + head * p.stride[1]);
    }
  }
}

}  // namespace

void KVQ_NAME(kvq_seal_)(const KvqPages& p) {
  for_each_block(p, [&](Block& block, uint8_t* record, int64_t at) {
    for (int t = 0; t < block.tokens; t++) {
      float* row = block.values.data() + int64_t(t) * block.dim;
      load_row(p.dtype, p.states, at + t * p.stride[2], block.dim, row);
      if (p.rotated) rotate(row, block.dim);
    }
    block.quantize();
    write_block(block, record);
  });
}

void KVQ_NAME(kvq_restore_)(const KvqPages& p) {
  for_each_block(p, [&](Block& block, const uint8_t* record, int64_t at) {
    read_block(block, record);
    block.dequantize();
    for (int t = 0; t < block.tokens; t++) {
      float* row = block.values.data() + int64_t(t) * block.dim;
      if (p.rotated) rotate(row, block.dim);
      store_row(p.dtype, row, block.dim, p.states, at + t * p.stride[2]);
    }
  });
}
