// Scores and sums of values over packed pages, for one task.

constexpr int kMostGroups = 64;  // groups of channels that vnni.inl takes

struct PageReader : Task {
  int64_t ahead = 0;  // bytes from the current page to the next: loops fetch there what they read here
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
    std::fill_n(page, rows * fields * value_lanes, 0.f);
#if KVQ_VNNI
    if constexpr (CODE == KVQ_INTEGER)
      if (integer_values) return add_integer_values<BITS>(record);
#endif
    fold_token_scales();
    const int segment = a.value.per_channel ? words_per_row : std::min(words_per_row, a.value.group);
    for (int first = 0; first < words_per_row; first += segment)
      for (int w = first; w < first + segment; w += LANES)
        add_lanes<CODE, BITS>(record, w, std::min(LANES, first + segment - w));
    add_page();
  }

  template <int CODE, int BITS>
  void add_lanes(const uint8_t* record, int w, int lanes) {
    constexpr int kFields = 8 / BITS;
    const int stride = fields * value_lanes;
    for (int r = 0; r < rows; r += kGroupOfRows) {
      const float* p[kFields];
      float* sum_of[kFields];
      for (int f = 0; f < kFields; f++) {
        const int group = a.value.per_channel ? 0 : (f * words_per_row + w) / a.value.group;
        p[f] = weights + (int64_t(group) * rows + r) * tokens_at_most;
        sum_of[f] = page + r * stride + f * value_lanes + w;
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
        bias[r * groups + g] = dot(p, zero, a.page_size);
      }
  }

  // Adds one page's sums with what its zero points contribute. Page by page, since the two nearly cancel: summed apart
  // over a long context they would leave their rounding errors behind.
  void add_page() {
    const int segment = a.value.per_channel ? words_per_row : std::min(words_per_row, a.value.group);
    for (int r = 0; r < rows; r++) {
      const float total = a.value.per_channel ? sum_of(scores + r * tokens_at_most, a.page_size) : 0.f;
      for (int f = 0; f < fields; f++) {
        const int row = (r * fields + f) * value_lanes, channel = f * words_per_row;
        if (a.value.per_channel)
          add_scaled(packed + row, page + row, scales + channel, zeros + channel, total);
        else
          for (int w = 0; w < words_per_row; w += segment)
            add_shifted(packed + row + w, page + row + w, segment, bias[r * groups + (channel + w) / a.value.group]);
      }
    }
  }

  void add_scaled(float* __restrict to, const float* __restrict from, const float* scale, const float* zero, float total) const {
    for (int w = 0; w < words_per_row; w++) to[w] += from[w] * scale[w] + total * zero[w];
  }

  static void add_shifted(float* __restrict to, const float* __restrict from, int n, float shift) {
    for (int w = 0; w < n; w++) to[w] += from[w] + shift;
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
    constexpr int kLines = lines_at_once<BITS>();
    const int block = a.key.dim / 4 * kWordLanes * 4;  // bytes
    int t = 0;
    for (; t + kLines * kTokens <= a.page_size; t += kLines * kTokens, record += kLines * block)
      integer_key_block<BITS, kLines>(record, q, t);
    for (; t < a.page_size; t += kTokens, record += block) integer_key_block<BITS, 1>(record, q, t);
  }

  template <int BITS, int LINES>
  void integer_key_block(const uint8_t* record, const RoundedQuery* q, int t) {
    constexpr int kRows = rows_at_once<BITS>();
    for (int r = 0; r < rows; r += kRows) {
      float* to = scores + r * tokens_at_most + t;
      const int64_t next = r ? 0 : ahead;
      switch (std::min(kRows, rows - r)) {
        case 1: vnni_key_products<BITS, 1, LINES>(record, q + r, a.key.dim, to, tokens_at_most, next); break;
        case 2: vnni_key_products<BITS, 2, LINES>(record, q + r, a.key.dim, to, tokens_at_most, next); break;
        case 3: vnni_key_products<BITS, 3, LINES>(record, q + r, a.key.dim, to, tokens_at_most, next); break;
        default: vnni_key_products<BITS, kRows, LINES>(record, q + r, a.key.dim, to, tokens_at_most, next);
      }
    }
  }

  template <int BITS>
  void add_integer_values(const uint8_t* record) {
    float step[kMostGroups * kMostRows];
    uint8_t *high = bytes.data(), *low = high + int64_t(groups) * rows * tokens_at_most;
    round_page_weights<BITS>(step, high, low);
    constexpr int kLines = lines_at_once<BITS>();
    const int segment = std::min(words_per_row, a.value.group);
    for (int w = 0; w < words_per_row;) {
      const int lanes = std::min(kLines * kWordLanes, segment - w % segment);
      if (kLines == 1 || lanes > kWordLanes)
        add_integer_lanes<BITS, kLines>(record, step, high, low, w, lanes);
      else
        add_integer_lanes<BITS, 1>(record, step, high, low, w, lanes);
      w += lanes;
    }
    add_page();
  }

  template <int BITS, int LINES>
  void add_integer_lanes(const uint8_t* record, const float* step, const uint8_t* high, const uint8_t* low, int w, int lanes) {
    constexpr int kFields = 8 / BITS, kRows = rows_at_once<BITS>();
    const int stride = fields * value_lanes, n = a.page_size, p_stride = tokens_at_most;
    const uint8_t* words = record + 4 * w;
    for (int r = 0; r < rows; r += kRows) {
      const uint8_t *h[kFields], *l[kFields];
      const float* s[kFields];
      float* to[kFields];
      for (int f = 0; f < kFields; f++) {
        const int64_t at = int64_t((f * words_per_row + w) / a.value.group) * rows + r;
        h[f] = high + at * p_stride;
        l[f] = low + at * p_stride;
        s[f] = step + at;
        to[f] = page + r * stride + f * value_lanes + w;
      }
      const int64_t next = r ? 0 : ahead;
      switch (std::min(kRows, rows - r)) {
        case 1: vnni_value_products<BITS, 1, LINES>(words, words_per_row, n, h, l, p_stride, s, to, stride, lanes, next); break;
        case 2: vnni_value_products<BITS, 2, LINES>(words, words_per_row, n, h, l, p_stride, s, to, stride, lanes, next); break;
        case 3: vnni_value_products<BITS, 3, LINES>(words, words_per_row, n, h, l, p_stride, s, to, stride, lanes, next); break;
        default: vnni_value_products<BITS, kRows, LINES>(words, words_per_row, n, h, l, p_stride, s, to, stride, lanes, next);
      }
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
        bias[r * groups + g] = dot(p, zero, a.page_size) + exact_middle - middle * step[at] * float(total);
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
};
