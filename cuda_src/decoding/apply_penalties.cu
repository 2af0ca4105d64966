// Apply penalties and the temperature to logits.
//
// x starts as logits[b, i]. n[i]: how often token i was generated. made[i]: n[i] > 0, or i is in `output_mask`.
// seen[i]: made[i], or i is in the prompt or in `prompt_mask`.
//
//   x = seen[i] ? x * (x > 0 ? 1 / repetition : repetition) : x
//   x = n[i] > 0 ? x - frequency * n[i] : x
//   x = made[i] ? x - presence : x
//   x = -inf   if token i would complete a bad word, or is end_id before min_length tokens are generated
//   out[b, i] = x * (1 / temperature), or x if the temperature is not a positive normal number
//
// Grid: `slices` blocks per row, each for TOKENS tokens of the vocabulary. A block keeps one 32-bit mark per token in
// shared memory. It counts the whole sequence with integer atomics, whose order does not change the result. Then one
// thread per token applies the penalties.
//
// PENALIZED: compute marks and apply penalties; else only divide by the temperature. ALL_LOGITS: read and write all
// logits; else `out` is `logits`, the temperature is 1, and only logits with a nonzero mark are read and written.
// WIDTH: logits per load; above 1 it needs aligned rows whose length is a multiple of WIDTH.
//
// Speed of light: memory bandwidth if ALL_LOGITS. On an H200, 64 rows of 128256 float32 with sequences of 512 tokens
// take 20 us (77% of the bandwidth of a copy). Without ALL_LOGITS, the latency of dependent loads and atomics is the
// limit: 14 us.
#include "common/numeric.cuh"
#include "common/overlap.cuh"
#include "decoding/pack.cuh"
#include "decoding/words.cuh"

template <typename T> struct PerRow {
    const T* values; // null: `value` for all rows
    T value;
    int stride; // 0: one element for all rows
    __device__ __forceinline__ T of(int row) const { return values ? values[(long long)row * stride] : value; }
};

struct PenaltyParams {
    const void* logits;         // [batch, vocab]  T
    void* out;                  // [batch, vocab]  T; may be logits: a thread writes only the elements that it reads
    const int* output_ids;      // [batch, max_length], may be null
    const int* sequence_length; // [batch]; null: 0
    const int* prompt_length;   // [batch]; null: 0
    const int* bad_words;       // [2, bad_words_size] for all rows, or one such list per row; may be null
    const void* prompt_mask;    // [batch, vocab] bool, may be null
    const void* output_mask;    // [batch, vocab] bool, may be null
    PerRow<float> temperature;
    PerRow<float> repetition;
    PerRow<float> presence;
    PerRow<float> frequency;
    PerRow<int> min_length;
    long long row_stride; // of logits
    long long out_row_stride;
    long long ids_row_stride;   // of output_ids
    long long bad_words_stride; // 0: one list for all rows
    int vocab;
    int slices; // blocks per row
    int max_length;
    int bad_words_size;
    int end_id;
    int counts; // whether a penalty needs the counts of tokens
};

template <int TOKENS> struct Slice {
    int row, first_token;
    unsigned tokens;

    __device__ __forceinline__ explicit Slice(const PenaltyParams& p) {
        row = blockIdx.x / p.slices;
        first_token = (blockIdx.x - row * p.slices) * TOKENS;
        tokens = min(TOKENS, p.vocab - first_token);
    }

    // The subtraction is unsigned, so the index of an id outside the slice is at least `tokens`.
    __device__ __forceinline__ unsigned index_of(int id) const { return id - unsigned(first_token); }
};

// The tokens of a row: first the prompt, then the generated tokens.
struct Sequence {
    const int* ids;
    int given_length; // may exceed the size of `ids`
    int length;
    int prompt; // may exceed `length`

    __device__ __forceinline__ Sequence(const PenaltyParams& p, int row) {
        given_length = p.sequence_length ? max(p.sequence_length[row], 0) : 0;
        prompt = p.prompt_length ? max(p.prompt_length[row], 0) : 0;
        length = min(given_length, p.max_length);
        ids = p.output_ids + row * p.ids_row_stride;
    }

    __device__ __forceinline__ int generated() const { return max(given_length - prompt, 0); }
};

// --- marks: the count and the flags of each token of the slice -----------------------------------------

// A mark is the count of a token in the output, plus flags. IN_OUTPUT: the token is in `output_mask`. IN_PROMPT: it is
// in the prompt or `prompt_mask`. BANNED: the logit becomes -inf.
constexpr unsigned IN_OUTPUT = 1u << 29, IN_PROMPT = 1u << 30, BANNED = 1u << 31;

// Return the mask bytes of four neighbouring tokens. Only `left` tokens remain in the slice; the bytes of the others
// are 0.
__device__ __forceinline__ unsigned mask_bytes(const void* mask, long long at, unsigned left, bool aligned) {
    if (!mask) return 0;
    const unsigned char* from = static_cast<const unsigned char*>(mask) + at;
    if (aligned) return *reinterpret_cast<const unsigned*>(from);
    unsigned bytes = 0;
#pragma unroll
    for (unsigned c = 0; c < 4; ++c)
        if (c < left) bytes |= unsigned(from[c]) << 8 * c;
    return bytes;
}

__device__ __forceinline__ unsigned masked_mark(unsigned prompt, unsigned output, int c) {
    const unsigned byte = 0xFFu << 8 * c;
    return (prompt & byte ? IN_PROMPT : 0) | (output & byte ? IN_OUTPUT : 0);
}

template <int THREADS, int TOKENS> struct Marks {
    static_assert(TOKENS % (THREADS * 4) == 0, "whole vectors to begin with");
    static constexpr int VECTORS = TOKENS / THREADS / 4; // of four marks per thread
    unsigned* mark;                                      // [TOKENS], in shared memory
    const Slice<TOKENS>& slice;
    bool any = false; // this thread has set a mark

    __device__ __forceinline__ void init(const PenaltyParams& p) {
        if (p.prompt_mask || p.output_mask) {
            const auto is_aligned = [&](const void* mask) {
                return reinterpret_cast<unsigned long long>(mask) % 4 == 0;
            };
            if (p.vocab % 4 == 0 && is_aligned(p.prompt_mask) && is_aligned(p.output_mask))
                init_from_masks<true>(p);
            else
                init_from_masks<false>(p);
        } else {
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) mark_vector(i) = make_uint4(0, 0, 0, 0);
        }
        __syncthreads();
    }

    // ALIGNED: load the mask bytes of four tokens at once.
    template <bool ALIGNED> __device__ __forceinline__ void init_from_masks(const PenaltyParams& p) {
        constexpr int LOADS = 2; // in flight per mask; more would need too many registers
        static_assert(VECTORS % LOADS == 0, "whole groups of loads");
        const long long row = (long long)slice.row * p.vocab + slice.first_token;
#pragma unroll
        for (int first = 0; first < VECTORS; first += LOADS) {
            unsigned prompt[LOADS], output[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const unsigned token = 4 * ((first + i) * THREADS + threadIdx.x);
                const unsigned left = token < slice.tokens ? slice.tokens - token : 0;
                prompt[i] = left ? mask_bytes(p.prompt_mask, row + token, left, ALIGNED) : 0;
                output[i] = left ? mask_bytes(p.output_mask, row + token, left, ALIGNED) : 0;
            }
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                mark_vector(first + i) =
                    make_uint4(masked_mark(prompt[i], output[i], 0), masked_mark(prompt[i], output[i], 1),
                               masked_mark(prompt[i], output[i], 2), masked_mark(prompt[i], output[i], 3));
                any |= (prompt[i] | output[i]) != 0;
            }
        }
    }

    __device__ __forceinline__ uint4& mark_vector(int i) const {
        return reinterpret_cast<uint4*>(mark)[i * THREADS + threadIdx.x];
    }

    __device__ __forceinline__ void count(const Sequence& sequence) {
        constexpr int LOADS = 4; // in flight per thread
        for (int start = threadIdx.x; start < sequence.length; start += LOADS * THREADS) {
            unsigned index[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int at = start + i * THREADS;
                index[i] = at < sequence.length ? slice.index_of(sequence.ids[at]) : ~0u;
            }
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                if (index[i] >= slice.tokens) continue;
                if (start + i * THREADS < sequence.prompt)
                    atomicOr(&mark[index[i]], IN_PROMPT);
                else
                    atomicAdd(&mark[index[i]], 1u);
                any = true;
            }
        }
    }

    // Ban the last token of a bad word if the sequence ends with the word's other tokens.
    __device__ __forceinline__ void ban_words(const Sequence& sequence, const Words& words) {
        for (int w = threadIdx.x; w < words.size; w += THREADS) {
            int begin, end;
            if (!words.find(w, begin, end)) continue;
            const unsigned last = slice.index_of(words.ids[end - 1]);
            if (last >= slice.tokens) continue;
            if (!ends_with(sequence.ids, sequence.length, words.ids + begin, end - 1 - begin)) continue;
            atomicOr(&mark[last], BANNED);
            any = true;
        }
    }

    __device__ __forceinline__ void ban_end(const Sequence& sequence, int end_id, const PerRow<int>& min_length) {
        const unsigned index = slice.index_of(end_id);
        if (threadIdx.x == 0 && index < slice.tokens && sequence.generated() < min_length.of(slice.row)) {
            atomicOr(&mark[index], BANNED);
            any = true;
        }
    }
};

// --- logits --------------------------------------------------------------------------------------------

struct Penalties {
    float repetition = 1.f, inverse_repetition = 1.f, presence = 0.f, frequency = 0.f;

    __device__ __forceinline__ void load(const PenaltyParams& p, int row) {
        repetition = p.repetition.of(row);
        inverse_repetition = __fdiv_rn(1.f, repetition);
        presence = p.presence.of(row);
        frequency = p.frequency.of(row);
    }

    // `mark` must not be 0. Each product is rounded (no fused multiply-add), as in the NumPy reference.
    __device__ __forceinline__ float apply(float x, unsigned mark) const {
        if (mark & BANNED) return -CUDART_INF_F;
        x = __fmul_rn(x, x > 0.f ? inverse_repetition : repetition);
        const unsigned count = mark & (IN_OUTPUT - 1);
        if (count) x = __fsub_rn(x, __fmul_rn(frequency, float(count)));
        return count || mark & IN_OUTPUT ? __fsub_rn(x, presence) : x;
    }
};

// Return 1 / temperature if the temperature is positive, normal and finite, else 1. 1 / subnormal may be infinite, and
// 1 / infinity times a logit of -inf would be NaN.
__device__ __forceinline__ float scale_of(float temperature) {
    const bool divides = temperature >= 0x1p-126f && temperature <= LARGEST_FLOAT;
    return divides ? __fdiv_rn(1.f, temperature) : 1.f;
}

// All logits of a slice. A pack is WIDTH neighbouring logits.
template <typename T, int WIDTH, int THREADS, int TOKENS> struct Logits {
    static constexpr int PACKS = TOKENS / THREADS / WIDTH;
    static_assert(TOKENS % (THREADS * WIDTH) == 0, "whole packs");
    RawPack<T, WIDTH> packs[PACKS];

    static __device__ __forceinline__ unsigned column_of(int i) { return (i * THREADS + threadIdx.x) * WIDTH; }

    __device__ __forceinline__ void load(const T* from, unsigned tokens) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i)
            if (column_of(i) < tokens) packs[i] = *reinterpret_cast<const RawPack<T, WIDTH>*>(from + column_of(i));
    }

    // `marks` is valid only if `marked`.
    __device__ __forceinline__ void write(T* to, unsigned tokens, bool marked, const unsigned* marks,
                                          const Penalties& penalties, float scale) const {
        using Packed = Pack<T, WIDTH>;
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (column_of(i) >= tokens) continue;
            Packed pack = reinterpret_cast<const Packed&>(packs[i]);
            float x[WIDTH];
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) x[j] = to_float(pack.item[j]);
            if (marked) {
                const auto mark = *reinterpret_cast<const Pack<unsigned, WIDTH>*>(marks + column_of(i));
#pragma unroll
                for (int j = 0; j < WIDTH; ++j)
                    if (mark.item[j]) x[j] = penalties.apply(x[j], mark.item[j]);
            }
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) pack.item[j] = from_float<T>(__fmul_rn(x[j], scale));
            *reinterpret_cast<Packed*>(to + column_of(i)) = pack;
        }
    }
};

template <typename T, int WIDTH, int THREADS, int TOKENS, bool PENALIZED, bool ALL_LOGITS>
__global__ void __launch_bounds__(THREADS) apply_penalties(const __grid_constant__ PenaltyParams p) {
    begin_behind_earlier_kernels();
    static_assert(PENALIZED || ALL_LOGITS, "nothing to do");
    const Slice<TOKENS> slice(p);
    const T* logits = static_cast<const T*>(p.logits) + slice.row * p.row_stride + slice.first_token;
    T* out = static_cast<T*>(p.out) + slice.row * p.out_row_stride + slice.first_token;

    Logits<T, WIDTH, THREADS, TOKENS> all_logits;
    if constexpr (ALL_LOGITS) all_logits.load(logits, slice.tokens);

    alignas(32) __shared__ unsigned marks[PENALIZED ? TOKENS : 1];
    Penalties penalties;
    bool marked = false;
    if constexpr (PENALIZED) {
        penalties.load(p, slice.row);
        Marks<THREADS, TOKENS> table{marks, slice};
        table.init(p);
        const Sequence sequence(p, slice.row);
        if (p.counts) table.count(sequence);
        if (p.bad_words)
            table.ban_words(sequence, Words(p.bad_words + slice.row * p.bad_words_stride, p.bad_words_size));
        table.ban_end(sequence, p.end_id, p.min_length);
        marked = __syncthreads_or(table.any);
    }

    if constexpr (ALL_LOGITS) {
        const float scale = scale_of(p.temperature.of(slice.row));
        all_logits.write(out, slice.tokens, PENALIZED && marked, marks, penalties, scale);
    } else if (marked) {
        for (unsigned i = threadIdx.x; i < slice.tokens; i += THREADS)
            if (marks[i]) out[i] = from_float<T>(penalties.apply(to_float(logits[i]), marks[i]));
    }
}
