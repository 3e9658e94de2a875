// Scores and sums of values over packed pages, for one task.

constexpr int kMostGroups = 64;  // groups of channels that vnni.inl takes

struct PageReader : Task {
  const uint8_t *key = nullptr, *value = nullptr;  // of the current page
  int64_t key_ahead = 0, value_ahead = 0;  // bytes from them to those that are read next: loops fetch there what they read here
  bool integer_keys = false, integer_values = false;  // whether products are those of vnni.inl
  std::vector<uint8_t> bytes;                         // what vnni.inl rounds queries and weights to

  PageReader(const KvqAttend& args, int64_t batch, int64_t head, int row, int count) : Task(args, batch, head, row, count) {
#if KVQ_VNNI
    integer_keys = !a.exact && a.key.code == KVQ_INTEGER && a.key.per_channel;
    const int64_t largest_code = a.value.bits == 8 ? 128 : (1 << a.value.bits) - 1;
    const bool fits = a.page_size * largest_code * int64_t(kWeightLevels) <= std::numeric_limits<int32_t>::max();
    integer_values = !a.exact && a.value.code == KVQ_INTEGER && !a.value.per_channel && groups <= kMostGroups && fits;
    bytes.resize(std::max(2 * int64_t(rows) * query_stride, 2 * int64_t(groups) * rows * tokens_at_most));
#endif
  }

  void load_scales(const KvqPart& part, const uint8_t* record, int64_t ahead) {
    const int n = part.per_channel ? part.dim : part.dim / part.group * a.page_size;
    for (const uint8_t* p = record + part.scales; p < record + part.head_stride; p += 64) prefetch(p + ahead);
    const int room = int(align16(n));
    std::fill(scales + n, scales + room, 0.f);
    std::fill(zeros + (part.zeros >= 0 ? n : 0), zeros + room, 0.f);
    load_row<KVQ_F16>(record + part.scales, 0, n, scales);
    if (part.zeros >= 0) load_row<KVQ_F16>(record + part.zeros, 0, n, zeros);
  }

  // Makes zeros what the centre of the codes stands for, instead of the middle of the grid.
  void move_zeros(const KvqPart& part, float centre) {
    const int n = part.per_channel ? part.dim : part.dim / part.group * a.page_size;
    for (int i = 0; i < n; i++) zeros[i] += scales[i] * (centre - part.middle);
  }

  template <int CODE, int BITS>
  void key_scores(const uint8_t* record) {
    load_scales(a.key, record, key_ahead);
#if KVQ_VNNI
    if constexpr (CODE == KVQ_INTEGER)
      if (integer_keys) return integer_key_scores<BITS>(record);
#endif
    move_zeros(a.key, kCentre<CODE, BITS>);
    if (a.key.per_channel) {
      fold_channel_scales();
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
      for (int r = 0; r < rows; r += kGroupOfRows)
        with_constant<kGroupOfRows>(rows - r, [&](auto count) {
          key_products<CODE, BITS, count.value>(record, q + r * query_stride, query_stride, first, last, block, kTokens, r ? 0 : key_ahead);
          for (int i = 0; i < count.value; i++) {
            float* s = scores + (r + i) * tokens_at_most + t;
            const float* product = block + i * kTokens;
            for (int j = 0; j < kTokens; j++) s[j] += token_scales ? product[j] * token_scales[t + j] : product[j];
          }
        });
  }

  template <int CODE, int BITS>
  void add_values(const uint8_t* record) {
    load_scales(a.value, record, value_ahead);
#if KVQ_VNNI
    if constexpr (CODE == KVQ_INTEGER)
      if (integer_values) return add_integer_values<BITS>(record);
#endif
    move_zeros(a.value, kCentre<CODE, BITS>);
    fold_token_scales();
    for (int g = 0; g < groups; g++)
      for (int w = 0; w < words_per_group; w += LANES)
        for (int r = 0; r < rows; r += kGroupOfRows)
          with_constant<kGroupOfRows>(rows - r, [&](auto count) {
            value_products<CODE, BITS, count.value>(
                column(record, g, w) + 4 * (w % kWordLanes), column_width(w), a.page_size,
                weights + (int64_t(g) * rows + r) * tokens_at_most, tokens_at_most, page + r * value_stride + g * value_group + w,
                value_stride, words_per_group, std::min(LANES, words_per_group - w), r ? 0 : value_ahead);
          });
    add_page();
  }

  // The column of up to 16 words that holds word w of a group, and how many it has.
  const uint8_t* column(const uint8_t* record, int group, int w) const {
    return record + int64_t(a.page_size) * (group * words_per_group + w / kWordLanes * kWordLanes);
  }
  int column_width(int w) const { return std::min(kWordLanes, words_per_group - w / kWordLanes * kWordLanes); }

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
        bias[g * rows + r] = dot(p, zero, a.page_size);
      }
  }

  // Adds one page's sums with what its zero points contribute. Page by page, since the two nearly cancel: summed apart
  // over a long context they would leave their rounding errors behind.
  void add_page() {
    for (int r = 0; r < rows; r++) {
      float* __restrict to = packed + r * value_stride;
      const float* from = page + r * value_stride;
      if (a.value.per_channel) {
        const float total = sum_of(scores + r * tokens_at_most, a.page_size);
        for (int d = 0; d < a.value.dim; d++) to[d] += from[d] * scales[d] + total * zeros[d];
        continue;
      }
      for (int g = 0; g < groups; g++)
        for (int d = g * value_group; d < (g + 1) * value_group; d++) to[d] += from[d] + bias[g * rows + r];
    }
  }

#if KVQ_VNNI
  // Products fetch the next page's codes while they read, so that memory would idle while numbers are rounded.
  // The last codes of a part, at most a quarter, are therefore fetched while the `n` numbers per row of the other part are.
  int64_t late_rows(const KvqPart& part, int n) const { return std::min<int64_t>(rows, part.scales / 4 / (n * kBytesPerNumber)); }
  int64_t first_late(const KvqPart& part, int n) const { return part.scales - late_rows(part, n) * n * kBytesPerNumber; }
  Lines late_lines(const uint8_t* record, const KvqPart& part, int n, int r) const {
    return {record + first_late(part, n) + r * n * kBytesPerNumber, int(late_rows(part, n)) - r};
  }

  // Calls f with numbers of consecutive blocks, MOST as long as there are so many, and the first of them.
  template <int MOST, class F>
  static void in_blocks(int blocks, F f) {
    int first = 0;
    for (; first + MOST <= blocks; first += MOST) f(Int<MOST>(), first);
    if constexpr (MOST > 1)
      for (; first < blocks; first++) f(Int<1>(), first);
  }

  template <int BITS>
  void integer_key_scores(const uint8_t* record) {
    constexpr int kTokens = kWordLanes * 8 / BITS;
    float step[kMostRows], offset[kMostRows];
    const Rounded rounded = {bytes.data(), bytes.data() + rows * query_stride, step, offset, query_stride};
    in_groups([&](auto count, int r) {
      const Lines lines = late_lines(value, a.value, a.key.dim, r);
      const Unfolded q = {rotated_query + r * query_stride, query_stride, scales, zeros, a.key.dim, lines};
      fold_and_round<true, count.value>(q, a.key.middle, rounded.from(r));
    });
    for (int r = 0; r < rows; r += kRowsAtOnce<BITS>)
      with_constant<kRowsAtOnce<BITS>>(rows - r, [&](auto count) {
        in_blocks<kBlocksAtOnce<BITS, count.value>>(a.page_size / kTokens, [&](auto blocks, int block) {
          const int64_t at = int64_t(block) * kWordLanes * a.key.dim;
          const bool fetch = r == 0 && at < first_late(a.key, a.page_size);
          vnni_key_products<BITS, blocks.value, count.value>(record + at, rounded.from(r), a.key.dim,
                                                             scores + r * tokens_at_most + block * kTokens, tokens_at_most,
                                                             fetch ? key_ahead : 0);
        });
      });
  }

  template <int BITS>
  void add_integer_values(const uint8_t* record) {
    float step[kMostGroups * kMostRows];
    const Rounded rounded = {bytes.data(), bytes.data() + int64_t(groups) * rows * tokens_at_most, step, bias, tokens_at_most};
    round_page_weights<BITS>(rounded);
    for (int g = 0; g < groups; g++)
      for (int r = 0; r < rows; r += kRowsAtOnce<BITS>)
        with_constant<kRowsAtOnce<BITS>>(rows - r, [&](auto count) {
          const auto products = [&](auto columns, int w) {
            const uint8_t* words = column(record, g, w);
            const bool fetch = r == 0 && words - record < first_late(a.value, a.key.dim);
            vnni_value_products<BITS, columns.value, count.value>(words, column_width(w), a.page_size, rounded.from(g * rows + r),
                                                                  packed + r * value_stride + g * value_group + w, value_stride,
                                                                  words_per_group, fetch ? value_ahead : 0);
          };
          in_blocks<kBlocksAtOnce<BITS, count.value>>(words_per_group / kWordLanes, [&](auto columns, int k) { products(columns, k * kWordLanes); });
          if (words_per_group % kWordLanes) products(Int<1>(), words_per_group / kWordLanes * kWordLanes);
        });
  }

  // Folds scales into weights and rounds them; the middle of the codes leaves through the biases.
  template <int BITS>
  void round_page_weights(Rounded rounded) {
    const float middle = a.value.middle - (BITS == 8 ? 128.f : 0.f);
    for (int g = 0; g < groups; g++)
      in_groups([&](auto count, int r) {
        const Lines lines = late_lines(key + key_ahead, a.key, a.page_size, g ? rows : r);
        const float *scale = scales + g * a.page_size, *zero = zeros + g * a.page_size;
        const Unfolded p = {scores + r * tokens_at_most, tokens_at_most, scale, zero, a.page_size, lines};
        fold_and_round<false, count.value>(p, middle, rounded.from(g * rows + r));
      });
  }
#endif

  // Pages first..last-1, and on the way fetches what is read after them: the tail, if it is, or the next head's first page.
  void pages(int first, int last, bool then_tail) {
    const int64_t column = a.start[b] + a.sinks.tokens;
    for (int p = first; p < last; p++) {
      go_to(p, last);
      if (then_tail) fetch_tail(p - first, last - first);
      by_format(a.key, [&](auto code, auto bits) { key_scores<code.value, bits.value>(key); });
      if (softmax(a.page_size, column + int64_t(p) * a.page_size))
        by_format(a.value, [&](auto code, auto bits) { add_values<code.value, bits.value>(value); });
    }
  }

  // Where this head's part of page p is, and where what is read next: its part of the next page, or of the first page that of
  // the next head.
  void go_to(int p, int last) {
    const bool ends_head = p + 1 == a.num_pages[b] && h + 1 < a.heads;
    const uint8_t *record = record_of(p), *next = record_of(ends_head ? 0 : std::min(p + 1, last - 1));
    key = record + a.key.first + h * a.key.head_stride;
    value = record + a.value.first + h * a.value.head_stride;
    key_ahead = next - record + ends_head * a.key.head_stride;
    value_ahead = next - record + ends_head * a.value.head_stride;
  }

  const uint8_t* record_of(int p) const { return a.pool + a.page_bytes * a.table[b * a.table_stride + p]; }

  template <class F>
  static void by_format(const KvqPart& part, F f) {
    if (part.code == KVQ_E4M3) return f(Int<KVQ_E4M3>(), Int<8>());
    if (part.code == KVQ_E5M2) return f(Int<KVQ_E5M2>(), Int<8>());
    if (part.bits == 8) return f(Int<KVQ_INTEGER>(), Int<8>());
    if (part.bits == 4) return f(Int<KVQ_INTEGER>(), Int<4>());
    return f(Int<KVQ_INTEGER>(), Int<2>());
  }
};
