// One task: the running softmax of some query rows of one KV head over a part of its columns.

constexpr int kMostRows = 16;  // query rows of one task
constexpr int kTile = 16;      // exact tokens that are converted to float32 at once
constexpr int kMostChannels = 512;  // of a head; see layout.py
constexpr int kTokensAhead = 256;  // exact tokens that are fetched while pages are read, all of the usual ones
constexpr int kSideBySide = LANES == 16 ? 4 : 2;  // exact tokens, or registers of channels, that share loads of the others

// Its state, the scratch of one block of tokens, and how exact segments are added. Pages are added by PageReader.
struct Task {
  const KvqAttend& a;
  int64_t b, h;
  int first_row, rows, tokens_at_most;
  int fields, groups, value_group, words_per_group;  // of values: codes in a byte, and what shares weights
  int query_stride, value_stride;
  std::vector<float> memory;
  float *query, *rotated_query, *folded, *offset;  // [rows][dim] three times, [rows]
  float *scores, *weights;      // [rows][tokens], [groups][rows][tokens]
  float *max, *sum;             // of the softmax so far: [rows]
  float *plain, *packed, *page;  // sums of values: of exact ones, of pages, of one page without zero points: [rows][value dim]
  float *tile;                  // some exact tokens: [kTile][dim]
  float *bias;                  // what one page's zero points add: [groups][rows]
  float *scales, *zeros;        // of one page, in float32, and zero up to a multiple of 16

  Task(const KvqAttend& args, int64_t batch, int64_t head, int row, int count)
      : a(args), b(batch), h(head), first_row(row), rows(count) {
    tokens_at_most = int(std::max(align16(a.page_size), int64_t(128)));
    fields = 8 / a.value.bits;
    groups = a.value.per_channel ? 1 : a.value.dim / a.value.group;
    value_group = a.value.dim / groups;
    words_per_group = value_group / fields;
    query_stride = int(align16(a.key.dim));
    value_stride = int(align16(a.value.dim));
    const int key_scales = a.key.per_channel ? query_stride : a.key.dim / a.key.group * a.page_size;
    const int value_scales = a.value.per_channel ? value_stride : groups * a.page_size;
    const int64_t scale_room = std::max(key_scales, value_scales);
    struct Block {
      float** at;
      int64_t size;
    };
    const int64_t n = rows, query_room = n * query_stride, value_room = n * value_stride;
    const Block blocks[] = {{&query, query_room}, {&rotated_query, query_room}, {&folded, query_room}, {&offset, n},
                            {&scores, n * tokens_at_most}, {&weights, n * groups * tokens_at_most},
                            {&max, n}, {&sum, n}, {&plain, value_room}, {&packed, value_room}, {&page, value_room},
                            {&bias, n * groups}, {&tile, kTile * std::max(query_stride, value_stride)}, {&scales, scale_room}, {&zeros, scale_room}};
    int64_t total = 0;
    for (const Block& block : blocks) total += align16(block.size);
    memory.assign(total + 16, 0.f);
    float* next = (float*)((uintptr_t(memory.data()) + 63) & ~uintptr_t(63));  // so that no register is in two cache lines
    for (const Block& block : blocks) {
      *block.at = next;
      next += align16(block.size);
    }
    load_query();
  }

  void load_query() {
    const int dim = a.key.dim;
    for (int r = 0; r < rows; r++) {
      float* q = query + r * query_stride;
      load_row(a.query_dtype, a.query, b * a.query_stride[0] + head_of(r) * a.query_stride[1] + token_of(r) * a.query_stride[2], dim, q);
      for (int d = 0; d < dim; d++) q[d] *= a.scale * kLog2e;
      memcpy(rotated_query + r * query_stride, q, dim * sizeof(float));
      if (a.key_rotated) rotate(rotated_query + r * query_stride, dim);
      max[r] = kMinusInf;
    }
  }

  // The query head and the query of row r.
  int64_t head_of(int r) const { return h * a.n_rep + (first_row + r) / a.q_len; }
  int64_t token_of(int r) const { return (first_row + r) % a.q_len; }

  void add_sink_logits() {
    for (int r = 0; r < rows && a.sink_logits; r++) {
      max[r] = a.sink_logits[head_of(r)] * kLog2e;
      sum[r] = 1.f;
    }
  }

  // Softcap and mask, then weights relative to the running maximum: scores become weights. Returns false if no score of any
  // row is above -inf, so that there is nothing to add; a row with NaN has it in its sum.
  bool softmax(int tokens, int64_t column) {
    bool any = false;
    for (int r = 0; r < rows; r++) adjust(r, tokens, column);
    in_groups([&](auto count, int r) { any |= to_weights<count.value>(r, int(align16(tokens))); });
    return any;
  }

  void adjust(int r, int tokens, int64_t column) {
    float* s = scores + r * tokens_at_most;
    if (a.softcap > 0.f) {
      const float cap = a.softcap * kLog2e;
      for (int t = 0; t < tokens; t++) s[t] = cap * std::tanh(s[t] / cap);
    }
    if (a.mask) {
      const float* m = a.mask + b * a.mask_stride[0] + head_of(r) * a.mask_stride[1] + token_of(r) * a.mask_stride[2] + column;
      for (int t = 0; t < tokens; t++) s[t] = m[t] == kMinusInf ? kMinusInf : s[t] + m[t] * kLog2e;
    }
    std::fill(s + tokens, s + align16(tokens), kMinusInf);
  }

  // Of n scores of rows r..r+ROWS-1, n a multiple of 16. Maxima leave NaN aside.
  template <int ROWS>
  bool to_weights(int r, int n) {
    float* s = scores + r * tokens_at_most;
    Vf tops[ROWS], totals[ROWS] = {};
    each<ROWS>([&](auto i) KVQ_INLINED { tops[i] = totals[i] + kMinusInf; });
    for (int t = 0; t < n; t += LANES)
      each<ROWS>([&](auto i) KVQ_INLINED {
        const Vf x = load(s + i * tokens_at_most + t);
        tops[i] = x > tops[i] ? x : tops[i];
      });
    float base[ROWS];
    bool any = false;
    each<ROWS>([&](auto i) KVQ_INLINED {
      const float top = max_of(tops[i]);
      any |= top > kMinusInf;
      rescale(r + i, std::max(max[r + i], top));
      base[i] = std::max(max[r + i], std::numeric_limits<float>::lowest());  // so that scores of -inf have weight 0
    });
    for (int t = 0; t < n; t += LANES)
      each<ROWS>([&](auto i) KVQ_INLINED {
        const Vf weight = exp2_nonpositive(load(s + i * tokens_at_most + t) - base[i]);
        store(s + i * tokens_at_most + t, weight);
        totals[i] += weight;
      });
    each<ROWS>([&](auto i) KVQ_INLINED { sum[r + i] += sum_of(totals[i]); });
    return any;
  }

  void rescale(int r, float top) {
    if (!(top > max[r])) return;
    const float keep = max[r] == kMinusInf ? 0.f : exp2_nonpositive(max[r] - top);
    max[r] = top;
    sum[r] *= keep;
    for (int d = 0; d < a.value.dim; d++) plain[r * value_stride + d] *= keep;
    for (int d = 0; d < a.value.dim; d++) packed[r * value_stride + d] *= keep;
  }

  // The number at which a token of this head begins in a segment.
  int64_t place(const int64_t* stride, int64_t token) const { return b * stride[0] + h * stride[1] + token * stride[2]; }

  // Adds `count` tokens of a segment from `first` on, the first of which is at `column`.
  void exact(const KvqSegment& s, int64_t first, int64_t count, int64_t column) {
    for (int64_t done = 0; done < count; done += tokens_at_most) {
      const int tokens = int(std::min<int64_t>(tokens_at_most, count - done));
      const int64_t key = place(s.key_stride, first + done), value = place(s.value_stride, first + done);
      for (int t = 0; t < tokens; t += kTile) {
        load_tile(s.key, key + t * s.key_stride[2], s.key_stride[2], std::min(kTile, tokens - t), a.key.dim, query_stride);
        in_groups([&](auto count, int r) { score_tile<count.value>(r, t, std::min(kTile, tokens - t)); });
      }
      if (!softmax(tokens, column + done)) continue;
      for (int t = 0; t < tokens; t += kTile) {
        load_tile(s.value, value + t * s.value_stride[2], s.value_stride[2], std::min(kTile, tokens - t), a.value.dim, value_stride);
        in_groups([&](auto count, int r) { add_tile<count.value>(r, t, std::min(kTile, tokens - t)); });
      }
    }
  }

  template <class F>
  void in_groups(F f) const {
    for (int r = 0; r < rows; r += kGroupOfRows) with_constant<kGroupOfRows>(rows - r, [&](auto count) { f(count, r); });
  }

  // Some tokens in float32, each filled up with zeros to a multiple of 16 numbers.
  void load_tile(const void* from, int64_t at, int64_t step, int tokens, int dim, int stride) {
    by_dtype(a.dtype, [&](auto dtype) {
      for (int t = 0; t < tokens; t++) load_row<dtype.value>(from, at + t * step, dim, tile + t * stride);
    });
    if (dim < stride)
      for (int t = 0; t < tokens; t++) std::fill(tile + t * stride + dim, tile + (t + 1) * stride, 0.f);
  }

  // May also write scores of tokens that the tile has not, up to a multiple of kSideBySide: softmax() replaces them.
  template <int ROWS>
  void score_tile(int r, int first, int tokens) {
    for (int t = 0; t < tokens; t += kSideBySide) {
      Vf sums[ROWS][kSideBySide] = {};
      for (int d = 0; d < query_stride; d += LANES) {
        Vf x[kSideBySide];
        each<kSideBySide>([&](auto j) KVQ_INLINED { x[j] = load(tile + (t + j) * query_stride + d); });
        each<ROWS>([&](auto i) KVQ_INLINED {
          const Vf q = load(query + (r + i) * query_stride + d);
          each<kSideBySide>([&](auto j) KVQ_INLINED { sums[i][j] += q * x[j]; });
        });
      }
      each<ROWS>([&](auto i) KVQ_INLINED { store_sums(sums[i], scores + (r + i) * tokens_at_most + first + t); });
    }
  }

  template <int ROWS>
  void add_tile(int r, int first, int tokens) {
    for (int d = 0; d < value_stride; d += kSideBySide * LANES)
      with_constant<kSideBySide>((value_stride - d) / LANES, [&](auto count) { add_channels<ROWS, count.value>(r, d, first, tokens); });
  }

  // Adds weighted values of some registers of channels, from channel d on.
  template <int ROWS, int REGISTERS>
  void add_channels(int r, int d, int first, int tokens) {
    Vf sums[ROWS][REGISTERS];
    each<ROWS>([&](auto i) KVQ_INLINED {
      each<REGISTERS>([&](auto j) KVQ_INLINED { sums[i][j] = load(plain + (r + i) * value_stride + d + j * LANES); });
    });
    for (int t = 0; t < tokens; t++) {
      Vf x[REGISTERS];
      each<REGISTERS>([&](auto j) KVQ_INLINED { x[j] = load(tile + t * value_stride + d + j * LANES); });
      each<ROWS>([&](auto i) KVQ_INLINED {
        const float weight = scores[(r + i) * tokens_at_most + first + t];
        each<REGISTERS>([&](auto j) KVQ_INLINED { sums[i][j] += weight * x[j]; });
      });
    }
    each<ROWS>([&](auto i) KVQ_INLINED {
      each<REGISTERS>([&](auto j) KVQ_INLINED { store(plain + (r + i) * value_stride + d + j * LANES, sums[i][j]); });
    });
  }

  int64_t num_sinks() const { return a.num_pages[b] ? a.sinks.tokens : 0; }
  int64_t first_of_tail() const { return a.start[b] + num_sinks() + int64_t(a.num_pages[b]) * a.page_size; }
  int64_t skipped_in_tail() const { return first_of_tail() - (a.settled - a.tail_tokens); }  // tokens of pages of this row

  void exact_segments() {
    exact(a.sinks, 0, num_sinks(), a.start[b]);
    exact(a.tail, skipped_in_tail(), a.settled - first_of_tail(), first_of_tail());
    exact(a.chunk, 0, a.chunk.tokens, a.settled);
  }

  // Fetches part i of n of the tail. Left to itself the processor would wait for it: each tile is computed on at once.
  KVQ_INLINE void fetch_tail(int64_t i, int64_t n) const {
    const int64_t first = skipped_in_tail(), count = std::min<int64_t>(a.settled - first_of_tail(), kTokensAhead);
    const int64_t item = a.dtype == KVQ_F32 ? 4 : 2;
    for (int64_t t = first + count * i / n; t < first + count * (i + 1) / n; t++) {
      const auto* key = (const uint8_t*)a.tail.key + item * place(a.tail.key_stride, t);
      const auto* value = (const uint8_t*)a.tail.value + item * place(a.tail.value_stride, t);
      for (int64_t at = 0; at < item * a.key.dim; at += 64) prefetch_for_later(key + at);
      for (int64_t at = 0; at < item * a.value.dim; at += 64) prefetch_for_later(value + at);
    }
  }

  // [rows][2 + 2 * value dim]: maximum, sum, exact part, part in the basis of the pages.
  void write(float* out) const {
    const int dim = a.value.dim;
    for (int r = 0; r < rows; r++, out += 2 + 2 * dim) {
      out[0] = max[r];
      out[1] = sum[r];
      memcpy(out + 2, plain + r * value_stride, dim * sizeof(float));
      memcpy(out + 2 + dim, packed + r * value_stride, dim * sizeof(float));
    }
  }
};
