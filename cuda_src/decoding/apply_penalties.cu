// Apply penalties to the logits of the tokens that the sequence already has, then divide all logits by the temperature.
//
// x starts as logits[b, i], and n[i] is the number of times that token i was generated. made[i] is true if token i was
// generated or is in `output_mask`. seen[i] is true if made[i] is true, or if token i is in the prompt or in
// `prompt_mask`.
//
//   x = seen[i] ? x * (x > 0 ? 1 / repetition : repetition) : x
//   x = n[i] > 0 ? x - frequency * n[i] : x
//   x = made[i] ? x - presence : x
//   x = -inf   if token i would complete a bad word, or is end_id before min_length tokens are generated
//   out[b, i] = x * (1 / temperature), or x if the temperature is not a positive normal number
//
// Grid: `slices` blocks per row, each for TOKENS neighbouring tokens of the vocabulary. A block stores one 32-bit mark
// per token in shared memory. The mark contains the token's count and flags. The block reads the whole sequence of its
// row and counts with integer atomics, so the result does not depend on their order. Then one thread per token applies
// the penalties once, with the final count.
//
// COUNTED: the kernel computes marks and applies penalties; if not COUNTED, it only divides by the temperature. WHOLE:
// all logits are read and written; if not WHOLE, `out` is `logits`, the temperature is 1, and only the logits of tokens
// with a nonzero mark are read and written. WIDTH: logits per load; a WIDTH above 1 needs aligned rows whose length is
// a multiple of WIDTH.
//
// `logits` and `out` are [batch, vocab] with separate row strides. They may be the same array, because the thread that
// reads a logit also writes it.
//
// Speed of light: memory bandwidth if WHOLE; each logit is read once and written once. On an H200, 64 rows of 128256
// float32 with sequences of 512 tokens take 20 us, which is 77% of the bandwidth of a copy. If not WHOLE, the kernel
// moves few bytes and is latency-bound: each block initializes its marks, loads the length, loads the sequence, waits
// for the atomics, and loads the marked logits, and each of these steps waits for the previous step. The rows of the
// example above then take 14 us.
#include "common/numeric.cuh"
#include "common/overlap.cuh"
#include "decoding/pack.cuh"
#include "decoding/words.cuh"

// A parameter that is either one value for all rows, or an array with one value per row.
template <typename T> struct PerRow {
    const T* values; // null: `value` for all rows
    T value;
    int stride; // 0: one element for all rows
    __device__ __forceinline__ T of(int row) const { return values ? values[(long long)row * stride] : value; }
};

struct PenaltyParams {
    const void* logits;         // [batch, vocab]  T
    void* out;                  // [batch, vocab]  T, may be logits
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
    int counts; // whether a penalty needs the counts, so the sequence must be read
};

// A slice is the work of one block: the `tokens` tokens of the vocabulary that start at `base`, in one row.
template <int TOKENS> struct Slice {
    int row, base;
    unsigned tokens;

    __device__ __forceinline__ explicit Slice(const PenaltyParams& p) {
        row = blockIdx.x / p.slices;
        base = (blockIdx.x - row * p.slices) * TOKENS;
        tokens = min(TOKENS, p.vocab - base);
    }

    // Return the index of a token in the slice. The subtraction is unsigned, so an id before the slice or below 0 gives
    // an index of `tokens` or more.
    __device__ __forceinline__ unsigned place_of(int id) const { return id - unsigned(base); }
};

// The tokens that a row already holds: the first `prompt` tokens are the prompt, the others were generated.
struct Sequence {
    const int* ids;
    int given_length; // may exceed the size of `ids`
    int length;       // number of tokens in `ids`
    int prompt;       // may exceed `length`

    __device__ __forceinline__ Sequence(const PenaltyParams& p, int row) {
        given_length = p.sequence_length ? max(p.sequence_length[row], 0) : 0;
        prompt = p.prompt_length ? max(p.prompt_length[row], 0) : 0;
        length = min(given_length, p.max_length);
        ids = p.output_ids + row * p.ids_row_stride;
    }

    __device__ __forceinline__ int generated() const { return max(given_length - prompt, 0); }
};

// --- marks: the count and the flags of each token of the slice -----------------------------------------

// A mark is the number of times that a token was generated, plus these flag bits. IN_OUTPUT: the token is in
// `output_mask`. IN_PROMPT: the token is in the prompt or in `prompt_mask`. BANNED: the logit becomes -inf.
constexpr unsigned IN_OUTPUT = 1u << 29, IN_PROMPT = 1u << 30, BANNED = 1u << 31;

// Return the mask bytes of four neighbouring tokens, or 0 if `mask` is null. The slice has only `left` tokens from the
// first of these tokens on. If `aligned`, use one 32-bit load.
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
    static constexpr int QUADS = TOKENS / THREADS / 4; // vectors of four marks that a thread initializes
    unsigned* mark;                                    // [TOKENS], in shared memory
    const Slice<TOKENS>& slice;
    bool any = false; // whether this thread has set a mark

    // Initialize the marks from the masks, or to zero.
    __device__ __forceinline__ void begin(const PenaltyParams& p) {
        if (p.prompt_mask || p.output_mask) {
            const auto is_aligned = [&](const void* mask) {
                return reinterpret_cast<unsigned long long>(mask) % 4 == 0;
            };
            if (p.vocab % 4 == 0 && is_aligned(p.prompt_mask) && is_aligned(p.output_mask))
                begin_masked<true>(p);
            else
                begin_masked<false>(p);
        } else {
#pragma unroll
            for (int i = 0; i < QUADS; ++i) quad(i) = make_uint4(0, 0, 0, 0);
        }
        __syncthreads();
    }

    // Initialize the marks from the masks. ALIGNED: the mask bytes of four tokens can be loaded as one 32-bit word.
    template <bool ALIGNED> __device__ __forceinline__ void begin_masked(const PenaltyParams& p) {
        constexpr int AT_ONCE = 2; // loads in flight for each mask; more would need too many registers
        static_assert(QUADS % AT_ONCE == 0, "whole groups of loads");
        const long long row = (long long)slice.row * p.vocab + slice.base;
#pragma unroll
        for (int first = 0; first < QUADS; first += AT_ONCE) {
            unsigned prompt[AT_ONCE], output[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const unsigned token = 4 * ((first + i) * THREADS + threadIdx.x);
                const unsigned left = token < slice.tokens ? slice.tokens - token : 0;
                prompt[i] = left ? mask_bytes(p.prompt_mask, row + token, left, ALIGNED) : 0;
                output[i] = left ? mask_bytes(p.output_mask, row + token, left, ALIGNED) : 0;
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                quad(first + i) =
                    make_uint4(masked_mark(prompt[i], output[i], 0), masked_mark(prompt[i], output[i], 1),
                               masked_mark(prompt[i], output[i], 2), masked_mark(prompt[i], output[i], 3));
                any |= (prompt[i] | output[i]) != 0;
            }
        }
    }

    __device__ __forceinline__ uint4& quad(int i) const {
        return reinterpret_cast<uint4*>(mark)[i * THREADS + threadIdx.x];
    }

    __device__ __forceinline__ void count(const Sequence& sequence) {
        constexpr int AT_ONCE = 4; // tokens of the sequence that a thread loads before it uses the first
        for (int start = threadIdx.x; start < sequence.length; start += AT_ONCE * THREADS) {
            unsigned place[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int at = start + i * THREADS;
                place[i] = at < sequence.length ? slice.place_of(sequence.ids[at]) : ~0u;
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (place[i] >= slice.tokens) continue;
                if (start + i * THREADS < sequence.prompt)
                    atomicOr(&mark[place[i]], IN_PROMPT);
                else
                    atomicAdd(&mark[place[i]], 1u);
                any = true;
            }
        }
    }

    // Ban the last token of a bad word if the sequence ends with the other tokens of the bad word.
    __device__ __forceinline__ void ban_words(const Sequence& sequence, const Words& words) {
        for (int w = threadIdx.x; w < words.size; w += THREADS) {
            int begin, end;
            if (!words.find(w, begin, end)) continue;
            const unsigned last = slice.place_of(words.ids[end - 1]);
            if (last >= slice.tokens) continue;
            if (!ends_with(sequence.ids, sequence.length, words.ids + begin, end - 1 - begin)) continue;
            atomicOr(&mark[last], BANNED);
            any = true;
        }
    }

    // Ban end_id until min_length tokens are generated.
    __device__ __forceinline__ void ban_end(const Sequence& sequence, int end_id, const PerRow<int>& min_length) {
        const unsigned place = slice.place_of(end_id);
        if (threadIdx.x == 0 && place < slice.tokens && sequence.generated() < min_length.of(slice.row)) {
            atomicOr(&mark[place], BANNED);
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

    // Apply the penalties to a logit with a nonzero mark. Each product is rounded (no fused multiply-add), as in the
    // CPU reference.
    __device__ __forceinline__ float apply(float x, unsigned mark) const {
        if (mark & BANNED) return -CUDART_INF_F;
        x = __fmul_rn(x, x > 0.f ? inverse_repetition : repetition);
        const unsigned count = mark & (IN_OUTPUT - 1);
        if (count) x = __fsub_rn(x, __fmul_rn(frequency, float(count)));
        return count || mark & IN_OUTPUT ? __fsub_rn(x, presence) : x;
    }
};

// Return 1 / temperature, or 1 if the temperature is not a positive, normal, finite float. For a subnormal temperature,
// 1 / temperature may be infinite. For an infinite temperature it would be 0, and 0 times a logit of -inf is NaN.
__device__ __forceinline__ float scale_of(float temperature) {
    const bool divides = temperature >= 0x1p-126f && temperature <= LARGEST_FLOAT;
    return divides ? __fdiv_rn(1.f, temperature) : 1.f;
}

// The logits of a slice, if WHOLE: all are read and written. A thread handles every THREADS-th pack; a pack is WIDTH
// logits.
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

    // `marked`: at least one token of the slice has a nonzero mark; if false, `marks` is not read.
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

template <typename T, int WIDTH, int THREADS, int TOKENS, bool COUNTED, bool WHOLE>
__global__ void __launch_bounds__(THREADS) apply_penalties(const __grid_constant__ PenaltyParams p) {
    begin_behind_earlier_kernels();
    static_assert(COUNTED || WHOLE, "nothing to do");
    const Slice<TOKENS> slice(p);
    const T* logits = static_cast<const T*>(p.logits) + slice.row * p.row_stride + slice.base;
    T* out = static_cast<T*>(p.out) + slice.row * p.out_row_stride + slice.base;

    // Issue the loads of the logits before the loads of the sequence.
    Logits<T, WIDTH, THREADS, TOKENS> whole;
    if constexpr (WHOLE) whole.load(logits, slice.tokens);

    alignas(32) __shared__ unsigned marks[COUNTED ? TOKENS : 1];
    Penalties penalties;
    bool marked = false;
    if constexpr (COUNTED) {
        penalties.load(p, slice.row);
        Marks<THREADS, TOKENS> found{marks, slice};
        found.begin(p);
        const Sequence sequence(p, slice.row);
        if (p.counts) found.count(sequence);
        if (p.bad_words)
            found.ban_words(sequence, Words(p.bad_words + slice.row * p.bad_words_stride, p.bad_words_size));
        found.ban_end(sequence, p.end_id, p.min_length);
        marked = __syncthreads_or(found.any);
    }

    if constexpr (WHOLE) {
        const float scale = scale_of(p.temperature.of(slice.row));
        whole.write(out, slice.tokens, COUNTED && marked, marks, penalties, scale);
    } else if (marked) {
        for (unsigned i = threadIdx.x; i < slice.tokens; i += THREADS)
            if (marks[i]) out[i] = from_float<T>(penalties.apply(to_float(logits[i]), marks[i]));
    }
}
