// Attention over packed pages and exact segments in float32 arithmetic, for one instruction set.
// Included by attend.cpp, which is compiled once for each; LANES is the number of floats in one of its registers.
//
// Layout of codes (layout.py): 32-bit words whose byte e belongs to channel 4i + e (keys) or token 4i + e (values), with
// 16 tokens (keys) or channels (values) side by side, so that unpacking and products need no horizontal sums, and in the
// order in which loops read them. A byte holds 8 / bits fields; field f belongs to the f-th block of 16 tokens, or of
// channels of a group that share their weights.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "kvq.h"
#include "names.inl"

namespace {

#include "simd.inl"

#include "products.inl"
#if KVQ_VNNI
#include "vnni.inl"
#endif

#include "task.inl"

#include "pages.inl"

// Merges the partial results of one row's splits into number `at` of its output and those that follow.
void merge(const KvqAttend& a, const float* partial, int64_t split_stride, int splits, int64_t at) {
  const int dim = a.value.dim;
  float top = kMinusInf, total = 0.f;
  for (int s = 0; s < splits; s++) top = std::max(top, partial[s * split_stride]);
  float plain[kMostChannels] = {}, packed[kMostChannels] = {};
  for (int s = 0; s < splits; s++) {
    const float* x = partial + s * split_stride;
    const float keep = x[0] == kMinusInf ? 0.f : exp2_nonpositive(x[0] - top);
    total += x[1] * keep;
    for (int d = 0; d < dim; d++) plain[d] += x[2 + d] * keep;
    for (int d = 0; d < dim; d++) packed[d] += x[2 + dim + d] * keep;
  }
  if (a.value_rotated) rotate(packed, dim);
  for (int d = 0; d < dim; d++) plain[d] = total == 0.f ? 0.f : (plain[d] + packed[d]) / total;
  store_row(a.query_dtype, plain, dim, a.out, at);
}

}  // namespace

void KVQ_NAME(kvq_attend_)(const KvqAttend& a) {
  const int rows = a.n_rep * a.q_len, row_blocks = (rows + kMostRows - 1) / kMostRows;
  const int64_t heads = int64_t(a.batch) * a.heads * row_blocks;
  if (heads == 0) return;
  int most_pages = 1;
  for (int b = 0; b < a.batch; b++) most_pages = std::max(most_pages, a.num_pages[b]);
  const int wanted = a.num_threads > 1 ? int((8 * a.num_threads + heads - 1) / heads) : 1;
  const int splits = std::max(1, std::min(wanted, most_pages / 4));
  const int64_t row_size = 2 + 2 * a.value.dim, block_size = std::min(rows, kMostRows) * row_size;
  std::vector<float> partial(heads * splits * block_size);
#pragma omp parallel for schedule(dynamic) num_threads(a.num_threads)
  for (int64_t i = 0; i < heads * splits; i++) {
    const int64_t head = i / splits, split = i % splits;
    const int64_t block = head % row_blocks, h = head / row_blocks % a.heads, b = head / row_blocks / a.heads;
    const int first = int(block) * kMostRows;
    PageReader task(a, b, h, first, std::min(kMostRows, rows - first));
    const int64_t pages = a.num_pages[b];
    if (split == 0) task.add_sink_logits();
    task.pages(int(pages * split / splits), int(pages * (split + 1) / splits), split == 0);
    if (split == 0) task.exact_segments();
    task.write(partial.data() + i * block_size);
  }
#pragma omp parallel for num_threads(a.num_threads)
  for (int64_t head = 0; head < heads; head++) {
    const int64_t block = head % row_blocks, bh = head / row_blocks;
    for (int r = 0; r < std::min(kMostRows, rows - int(block) * kMostRows); r++)
      merge(a, partial.data() + head * splits * block_size + r * row_size, block_size, splits,
            (bh * rows + block * kMostRows + r) * a.value.dim);
  }
}
