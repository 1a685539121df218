// softmax(scale * q @ k.T + mask) @ v, a block of keys at a time.
#include <cmath>
#include <limits>

#include "cpu/fast.h"
#include "cpu/fast_mask.h"
#include "mlx/fast.h"

namespace mlx_gguf::cpu {

namespace {

using Arrays = std::vector<array>;

// A few queries against many keys are cut along the keys, for the threads.
constexpr int64_t cut_from = 512, cut_keys = 256;

// Below this many multiplications another thread is not worth its waking.
constexpr int64_t small = 1 << 17;

// Rows of k or v in f32, padded.
struct Rows {
  const float* data;
  int64_t stride;
};

struct AttentionTask {
  float scale;
  bool causal;
  View q, k, v;
  std::optional<Mask> mask;
  Target out;

  int64_t B = q.shape[0], H = q.shape[1], L = q.shape[2], D = q.shape[3];
  int64_t Hk = k.shape[1], S = k.shape[2], Dv = v.shape[3];
  int64_t repeats = H / Hk;

  // The heads that share keys are done together: a row is a query and one of
  // them.
  int64_t rows = L * repeats;
  int64_t chunk = std::min(rows, attention_rows);
  int64_t chunks = (rows + chunk - 1) / chunk;
  // How keys are cut depends on the shape, never on the number of threads.
  int64_t parts =
      chunks == 1 && S >= cut_from ? (S + cut_keys - 1) / cut_keys : 1;
  int64_t wide = padded(Dv);

  // Results of rows over some keys.
  struct Partial {
    float* out; // [rows][wide]
    float* largest;
    float* sums;
  };
  int64_t partial_floats() const {
    return chunk * (wide + 2);
  }
  Partial partial(float* at) const {
    return {at, at + chunk * wide, at + chunk * (wide + 1)};
  }

  struct Piece {
    int64_t batch, head; // of k
    int64_t first, rows;
    int64_t key, end; // keys
  };

  Piece piece(int64_t i) const {
    // Later queries see more keys: those first, so that no thread ends late.
    int64_t part = i % parts, c = chunks - 1 - i / parts % chunks;
    int64_t head = i / parts / chunks;
    Piece p{};
    p.batch = head / Hk;
    p.head = head % Hk;
    p.first = c * chunk;
    p.rows = std::min(chunk, rows - p.first);
    p.key = parts > 1 ? part * cut_keys : 0;
    p.end = parts > 1 ? std::min(S, p.key + cut_keys) : S;
    if (causal && S >= L) {
      p.end = std::min(p.end, (p.first + p.rows - 1) / repeats + S - L + 1);
    }
    return p;
  }

  int64_t query(int64_t row) const {
    return row / repeats;
  }
  int64_t head(const Piece& p, int64_t row) const {
    return p.head * repeats + row % repeats;
  }

  void operator()() const {
    int64_t tasks = B * Hk * chunks * parts;
    Buffer saved(
        parts > 1 ? tasks * partial_floats() * sizeof(float) : size_t(0));
    auto one = [&](int64_t i) {
      Buffer own(parts > 1 ? 0 : partial_floats() * sizeof(float));
      Piece p = piece(i);
      Partial to = partial(
          parts > 1 ? floats_of(saved) + i * partial_floats() : floats_of(own));
      attend(p, to);
      if (parts == 1) {
        finish(p, to);
      }
    };
    if (B * H * L * S * (D + Dv) < small) {
      for (int64_t i = 0; i < tasks; ++i) {
        one(i);
      }
    } else {
      parallel_for(tasks, one);
    }
    for (int64_t i = 0; parts > 1 && i < tasks; i += parts) {
      finish(piece(i), join(floats_of(saved) + i * partial_floats()));
    }
  }

  Rows block(
      const View& a,
      const Piece& p,
      int64_t key,
      int64_t keys,
      float* buffer) const {
    int64_t n = a.shape[3], width = padded(n);
    int64_t at =
        p.batch * a.strides[0] + p.head * a.strides[1] + key * a.strides[2];
    if (a.number == Number::f32 && a.step() == 1 && width == n) {
      return {a.floats(at, nullptr), a.strides[2]};
    }
    for (int64_t j = 0; j < keys; ++j) {
      float* row = buffer + j * width;
      a.read(at + j * a.strides[2], a.step(), n, row);
      std::fill(row + n, row + width, 0.0f);
    }
    return {buffer, width};
  }

  void attend(const Piece& p, const Partial& to) const {
    int64_t width = padded(D);
    std::fill(to.out, to.out + p.rows * wide, 0.0f);
    std::fill(to.sums, to.sums + p.rows, 0.0f);
    std::fill(
        to.largest,
        to.largest + p.rows,
        -std::numeric_limits<float>::infinity());
    Buffer memory(
        (p.rows * (width + attention_keys) + attention_keys * (width + wide)) *
        sizeof(float));
    float* queries = floats_of(memory);
    float* scores = queries + p.rows * width;
    float* keys = scores + p.rows * attention_keys;
    float* values = keys + attention_keys * width;
    read_queries(p, queries);
    std::vector<char> seen = seen_blocks(p);
    for (int64_t key = p.key; key < p.end; key += attention_keys) {
      if (!seen[(key - p.key) / attention_keys]) {
        continue;
      }
      int64_t n = std::min(attention_keys, p.end - key);
      Rows kb = block(k, p, key, n, keys);
      Rows vb = block(v, p, key, n, values);
      AttentionBlock b{
          p.rows,
          n,
          width,
          wide,
          queries,
          kb.data,
          vb.data,
          kb.stride,
          vb.stride,
          scores,
          to.largest,
          to.sums,
          to.out};
      isa().fast.attention_scores(b);
      hide(p, key, n, scores);
      isa().fast.attention_values(b);
    }
  }

  void read_queries(const Piece& p, float* to) const {
    int64_t width = padded(D);
    for (int64_t r = 0; r < p.rows; ++r) {
      int64_t at = p.batch * q.strides[0] +
                   head(p, p.first + r) * q.strides[1] +
                   query(p.first + r) * q.strides[2];
      float* row = to + r * width;
      q.read(at, q.step(), D, row);
      for (int64_t d = 0; d < D; ++d) {
        row[d] *= scale;
      }
      std::fill(row + D, row + width, 0.0f);
    }
  }

  // Masks the scores of n keys.
  void hide(const Piece& p, int64_t key, int64_t n, float* scores) const {
    for (int64_t r = 0; r < p.rows; ++r) {
      float* s = scores + r * attention_keys;
      if (causal) {
        int64_t seen = query(p.first + r) + S - L + 1 - key;
        for (int64_t j = std::max<int64_t>(0, seen); j < n; ++j) {
          s[j] = hidden;
        }
      }
      if (mask) {
        mask->apply(mask_row(p, r, key), n, s);
      }
    }
  }

  // The blocks of keys that some row sees; a boolean mask may leave most out,
  // as a sliding window does.
  std::vector<char> seen_blocks(const Piece& p) const {
    int64_t keys = std::max<int64_t>(0, p.end - p.key);
    std::vector<char> blocks((keys + attention_keys - 1) / attention_keys, 0);
    bool all = true;
    if (mask && mask->boolean) {
      int64_t last = -1;
      for (int64_t r = 0; r < p.rows && all; ++r) {
        bool again = last == query(p.first + r) && mask->same_for_all_heads();
        last = query(p.first + r);
        all = again || mask->mark(mask_row(p, r, p.key), keys, blocks);
      }
    }
    // A row that sees nothing takes the mean of everything.
    if (!mask || !mask->boolean || !all) {
      std::fill(blocks.begin(), blocks.end(), 1);
    }
    return blocks;
  }

  Mask::Row mask_row(const Piece& p, int64_t r, int64_t key) const {
    int64_t row = p.first + r;
    return mask->row(p.batch, head(p, row), query(row), key);
  }

  // Adds the other parts of a chunk to its first, in their order.
  Partial join(float* at) const {
    Partial sum = partial(at);
    for (int64_t part = 1; part < parts; ++part) {
      Partial more = partial(at + part * partial_floats());
      for (int64_t r = 0; r < rows; ++r) {
        float top = std::max(sum.largest[r], more.largest[r]);
        if (more.largest[r] == -std::numeric_limits<float>::infinity()) {
          continue; // it saw nothing
        }
        float a = std::exp(sum.largest[r] - top);
        float b = std::exp(more.largest[r] - top);
        for (int64_t d = 0; d < wide; ++d) {
          sum.out[r * wide + d] *= a;
        }
        isa().axpy(b, more.out + r * wide, wide, sum.out + r * wide);
        sum.sums[r] = sum.sums[r] * a + more.sums[r] * b;
        sum.largest[r] = top;
      }
    }
    return sum;
  }

  void finish(const Piece& p, const Partial& from) const {
    for (int64_t r = 0; r < p.rows; ++r) {
      int64_t l = query(p.first + r);
      int64_t at = ((p.batch * H + head(p, p.first + r)) * L + l) * Dv;
      float* row = from.out + r * wide;
      float* y = out.floats(at, row);
      float sum = from.sums[r];
      for (int64_t d = 0; d < Dv; ++d) {
        y[d] = row[d] / sum;
      }
      out.write(y, at, Dv);
    }
  }
};

bool broadcasts(const array& mask, const mx::Shape& to) {
  if (mask.ndim() > to.size()) {
    return false;
  }
  size_t shift = to.size() - mask.ndim();
  for (size_t i = 0; i < mask.ndim(); ++i) {
    int size = mask.shape(static_cast<int>(i));
    if (size != 1 && size != to[shift + i]) {
      return false;
    }
  }
  return true;
}

bool supported(
    const array& q,
    const array& k,
    const array& v,
    const std::optional<array>& mask) {
  for (const array* a : {&q, &k, &v}) {
    if (!is_number(a->dtype()) || a->ndim() != 4 || a->size() == 0 ||
        a->shape(0) != q.shape(0)) {
      return false;
    }
  }
  if (q.shape(3) != k.shape(3) || k.shape(1) != v.shape(1) ||
      k.shape(2) != v.shape(2) || q.shape(1) % k.shape(1) != 0) {
    return false;
  }
  if (!mask) {
    return true;
  }
  mx::Dtype dtype = mx::result_type(q, k, v);
  bool fits = mask->dtype() == mx::bool_ ||
              (is_number(mask->dtype()) &&
               mx::promote_types(mask->dtype(), dtype) == dtype);
  return fits &&
         broadcasts(*mask, {q.shape(0), q.shape(1), q.shape(2), k.shape(2)});
}

} // namespace

std::optional<array> attention(
    const array& q,
    const array& k,
    const array& v,
    float scale,
    bool causal,
    const std::optional<array>& mask,
    mx::StreamOrDevice s) {
  auto stream = our_stream(s);
  if (!stream || !supported(q, k, v, mask)) {
    return std::nullopt;
  }
  Arrays inputs{q, k, v};
  if (mask) {
    inputs.push_back(*mask);
  }
  return array(
      {q.shape(0), q.shape(1), q.shape(2), v.shape(3)},
      mx::result_type(q, k, v),
      std::make_shared<Attention>(*stream, scale, causal),
      std::move(inputs));
}

void Attention::eval_cpu(const Arrays& inputs, array& out) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) {
    return;
  }
  std::optional<Mask> mask;
  if (inputs.size() == 4) {
    mask = Mask{View(inputs[3]), inputs[3].dtype() == mx::bool_};
  }
  enqueue(
      inputs,
      out,
      stream(),
      AttentionTask{
          scale_,
          causal_,
          View(inputs[0]),
          View(inputs[1]),
          View(inputs[2]),
          std::move(mask),
          Target(out)});
}

array Attention::spelled_out(const Arrays& inputs) {
  auto mask = inputs.size() == 4 ? std::optional(inputs[3]) : std::nullopt;
  return mx::fast::scaled_dot_product_attention(
      inputs[0],
      inputs[1],
      inputs[2],
      scale_,
      causal_ ? "causal" : "",
      mask,
      std::nullopt,
      false,
      stream());
}

bool Attention::is_equivalent(const mx::Primitive& other) const {
  auto& o = static_cast<const Attention&>(other);
  return scale_ == o.scale_ && causal_ == o.causal_;
}

std::vector<mx::Shape> Attention::output_shapes(const Arrays& inputs) {
  const mx::Shape& q = inputs[0].shape();
  return {{q[0], q[1], q[2], inputs[2].shape(3)}};
}

} // namespace mlx_gguf::cpu
