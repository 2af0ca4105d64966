// What a decoding step does around the choice of a token, after FasterTransformer: one kernel per piece.
//
//   decoding_init         the state of the sequences before the first step
//   update_logits         add the bias; a finished sequence gets end_id for ever
//   apply_penalties       repetition, presence and frequency penalties, banned tokens, temperature
//   stop_words_criterion  which sequences end with a stop word
//   update_finished       lengths and end flags after a token was chosen
//
// `logits` and `out` are [batch, vocab], each with a row stride of its own, and may be the same array: a thread that
// writes a token's logit is the one that has read it.
#include "common/warp.cuh"

template <typename T> constexpr float LARGEST = LARGEST_FLOAT;
template <> constexpr float LARGEST<__half> = 65504.f;
template <> constexpr float LARGEST<__nv_bfloat16> = 0x1.fep127f;

// WIDTH neighbouring items that are loaded and stored at once.
template <typename T, int WIDTH> struct alignas(WIDTH * sizeof(T)) Pack {
    T item[WIDTH];
};

// What a pack is while it only waits: as 16-bit items it would take a register each.
template <int BYTES> struct Register {
    using Type = uint4;
};
template <> struct Register<4> {
    using Type = unsigned;
};
template <> struct Register<2> {
    using Type = unsigned short;
};

struct DecodingInitParams {
    const int* start_ids;    // [batch]
    int* word_ids;           // [batch], may be start_ids
    int* sequence_length;    // [batch]
    unsigned char* finished; // [batch]
    float* cum_log_probs;    // [batch]
    int* offsets;            // SORTED: [batch + 1]
    int* id_vals;            // SORTED: [batch, vocab]
    int batch;
    int vocab;
    int slices; // SORTED: blocks per row
};

// The state of each sequence before the first step. If SORTED also what a segmented sort of [batch, vocab]
// probabilities starts from:
//
//   offsets[b] = b * vocab,   id_vals[b, i] = i
//
// Grid: a thread per sequence; if SORTED `slices` blocks per sequence, each of ITEMS ids per thread.
template <int THREADS, int ITEMS, bool SORTED>
__global__ void __launch_bounds__(THREADS) decoding_init(const __grid_constant__ DecodingInitParams p) {
    int row = blockIdx.x * THREADS + threadIdx.x;
    bool starts = row < p.batch;
    if constexpr (SORTED) {
        row = blockIdx.x / p.slices;
        const int slice = blockIdx.x - row * p.slices;
        starts = row < p.batch && slice == 0 && threadIdx.x == 0;
        if (blockIdx.x == 0 && threadIdx.x == 0) p.offsets[p.batch] = p.batch * p.vocab;
        if (row < p.batch) {
            int* ids = p.id_vals + (long long)row * p.vocab;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const int column = (slice * ITEMS + i) * THREADS + threadIdx.x;
                if (column < p.vocab) ids[column] = column;
            }
        }
    }
    if (!starts) return;
    p.word_ids[row] = p.start_ids[row];
    p.sequence_length[row] = 0;
    p.finished[row] = 0;
    p.cum_log_probs[row] = 0.f;
    if constexpr (SORTED) p.offsets[row] = row * p.vocab;
}

struct UpdateLogitsParams {
    const void* logits;            // [batch, vocab]  T
    const void* bias;              // [vocab]  T, may be null
    const unsigned char* finished; // [batch], may be null
    void* out;                     // [batch, vocab]  T, may be logits
    long long row_stride;          // of logits
    long long out_row_stride;
    int vocab;
    int slices; // blocks per row
    int end_id;
};

//   out[b, i] = logits[b, i] + bias[i]                        where the sequence goes on
//             = i == end_id ? largest : -largest (of T)       where it has finished, so that it gets end_id for ever
//
// Grid: `slices` blocks per row, each thread PACKS packs of WIDTH tokens that lie a block's width apart.
// WIDTH > 1 needs aligned rows of a multiple of WIDTH tokens.
template <typename T, int WIDTH, int THREADS, int PACKS>
__global__ void __launch_bounds__(THREADS) update_logits(const __grid_constant__ UpdateLogitsParams p) {
    using Packed = Pack<T, WIDTH>;
    using Raw = typename Register<sizeof(Packed)>::Type;
    const int row = blockIdx.x / p.slices;
    const int first = ((blockIdx.x - row * p.slices) * PACKS * THREADS + threadIdx.x) * WIDTH;
    const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride;
    const T* bias = static_cast<const T*>(p.bias);
    T* out = static_cast<T*>(p.out) + row * p.out_row_stride;
    const auto column_of = [&](int i) { return first + i * THREADS * WIDTH; };

    if (p.finished && p.finished[row]) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (column_of(i) >= p.vocab) continue;
            Packed pack;
#pragma unroll
            for (int j = 0; j < WIDTH; ++j)
                pack.item[j] = from_float<T>(column_of(i) + j == p.end_id ? LARGEST<T> : -LARGEST<T>);
            *reinterpret_cast<Packed*>(out + column_of(i)) = pack;
        }
        return;
    }
    // All loads come before the first store, which might be to the same memory for all the compiler knows.
    Raw packs[PACKS], added[PACKS];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        if (column_of(i) >= p.vocab) continue;
        packs[i] = *reinterpret_cast<const Raw*>(logits + column_of(i));
        if (bias) added[i] = *reinterpret_cast<const Raw*>(bias + column_of(i));
    }
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        if (column_of(i) >= p.vocab) continue;
        Packed pack = reinterpret_cast<const Packed&>(packs[i]);
        if (bias) {
            const Packed other = reinterpret_cast<const Packed&>(added[i]);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j)
                pack.item[j] = from_float<T>(to_float(pack.item[j]) + to_float(other.item[j]));
        }
        *reinterpret_cast<Packed*>(out + column_of(i)) = pack;
    }
}

// A parameter that is one number for all rows, or an array of one per row.
template <typename T> struct PerRow {
    const T* values; // null: `value` for all rows
    T value;
    int stride; // 0: one number that lies on the device
    __device__ __forceinline__ T of(int row) const { return values ? values[(long long)row * stride] : value; }
};

// A list of words, each of one or more tokens, as FasterTransformer lays it out: [2, size], the tokens of all words one
// after the other, then where each word ends. What is left of the second row is -1.
struct Words {
    const int* ids;
    const int* ends;
    int size;
    // Word `w` is ids[begin], ..., ids[end - 1]; false where the list has no such word.
    __device__ __forceinline__ bool find(int w, int& begin, int& end) const {
        begin = w ? ends[w - 1] : 0;
        end = ends[w];
        return 0 <= begin && begin < end && end <= size;
    }
};

// Whether the last `count` of the `length` tokens are those of `word`.
__device__ __forceinline__ bool ends_with(const int* tokens, int length, const int* word, int count) {
    if (count > length) return false;
    for (int i = 0; i < count; ++i)
        if (tokens[length - count + i] != word[i]) return false;
    return true;
}

struct PenaltyParams {
    const void* logits;         // [batch, vocab]  T
    void* out;                  // [batch, vocab]  T, may be logits
    const int* output_ids;      // [batch, max_length], may be null
    const int* sequence_length; // [batch], may be null: 0
    const int* prompt_length;   // [batch], may be null: 0
    const int* bad_words;       // [2, bad_words_size] for all rows, or one per row; may be null
    PerRow<float> temperature;
    PerRow<float> repetition;
    PerRow<float> presence;
    PerRow<float> frequency;
    PerRow<int> min_length;
    long long row_stride; // of logits
    long long out_row_stride;
    long long ids_row_stride;   // of output_ids
    long long bad_words_stride; // 0: the same for all rows
    int vocab;
    int slices; // blocks per row
    int max_length;
    int bad_words_size;
    int end_id;
    int counts; // some penalty depends on the tokens of the sequence
};

// With x = logits[b, i], n[i] the count of token i among the generated ones, seen[i] whether it is one of those or of
// the prompt:
//
//   x = seen[i] ? x * (x > 0 ? 1 / repetition : repetition) : x
//   x = n[i] > 0 ? x - frequency * n[i] - presence : x
//   x = -inf   where token i would complete a bad word, or is end_id before min_length tokens were generated
//   out[b, i] = x * (1 / temperature)                           (x where the temperature is no positive normal number)
//
// Grid: `slices` blocks per row, each for TOKENS neighbouring tokens of the vocabulary. A block marks what it learns of
// its tokens in a table in shared memory: it walks the row's sequence, whatever its length, and adds up with integer
// atomics, whose order does not matter. So each token is penalized once, by one thread, with its exact count.
//
// COUNTED: there may be marks; otherwise it is the temperature alone. WHOLE: all tokens are written; otherwise `out` is
// `logits`, the temperature is 1, and only the marked tokens are read and written.
// WIDTH > 1 needs aligned rows of a multiple of WIDTH tokens.
template <typename T, int WIDTH, int THREADS, int TOKENS, bool COUNTED, bool WHOLE>
__global__ void __launch_bounds__(THREADS) apply_penalties(const __grid_constant__ PenaltyParams p) {
    // A mark is the count, with these bits.
    constexpr unsigned IN_PROMPT = 1u << 30, BANNED = 1u << 31;
    constexpr int PACKS = TOKENS / THREADS / WIDTH;
    constexpr int AT_ONCE = 4; // tokens of the sequence that a thread waits for together
    static_assert(COUNTED || WHOLE, "nothing to do");
    static_assert(TOKENS % (THREADS * WIDTH) == 0 && TOKENS % (THREADS * 4) == 0, "whole packs");
    using Packed = Pack<T, WIDTH>;
    // Loaded packs wait as whole registers.
    using Raw = typename Register<sizeof(Packed)>::Type;

    const int row = blockIdx.x / p.slices;
    const int base = (blockIdx.x - row * p.slices) * TOKENS;
    const unsigned tokens = min(TOKENS, p.vocab - base);
    const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride + base;
    T* out = static_cast<T*>(p.out) + row * p.out_row_stride + base;
    const auto column_of = [&](int i) { return (i * THREADS + threadIdx.x) * WIDTH; };

    // The logits are on their way while the sequence is walked.
    Raw packs[WHOLE ? PACKS : 1];
    if constexpr (WHOLE) {
#pragma unroll
        for (int i = 0; i < PACKS; ++i)
            if (column_of(i) < tokens) packs[i] = *reinterpret_cast<const Raw*>(logits + column_of(i));
    }

    alignas(32) __shared__ unsigned marks[COUNTED ? TOKENS : 1];
    float repetition = 1.f, inverse_repetition = 1.f, presence = 0.f, frequency = 0.f;
    bool marked = false;
    if constexpr (COUNTED) {
        repetition = p.repetition.of(row);
        inverse_repetition = __fdiv_rn(1.f, repetition);
        presence = p.presence.of(row);
        frequency = p.frequency.of(row);
#pragma unroll
        for (int i = 0; i < TOKENS / THREADS / 4; ++i)
            reinterpret_cast<uint4*>(marks)[i * THREADS + threadIdx.x] = make_uint4(0, 0, 0, 0);
        __syncthreads();

        const int generated_to = p.sequence_length ? max(p.sequence_length[row], 0) : 0;
        const int prompt = p.prompt_length ? max(p.prompt_length[row], 0) : 0;
        const int length = min(generated_to, p.max_length);
        const int* sequence = p.output_ids + row * p.ids_row_stride;
        if (p.counts) {
            for (int start = threadIdx.x; start < length; start += AT_ONCE * THREADS) {
                unsigned token[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i)
                    token[i] = start + i * THREADS < length ? sequence[start + i * THREADS] - unsigned(base) : ~0u;
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    // As unsigned numbers, negative ids too lie past the slice.
                    if (token[i] >= tokens) continue;
                    if (start + i * THREADS < prompt)
                        atomicOr(&marks[token[i]], IN_PROMPT);
                    else
                        atomicAdd(&marks[token[i]], 1u);
                    marked = true;
                }
            }
        }
        if (p.bad_words) {
            const int* list = p.bad_words + row * p.bad_words_stride;
            const Words words{list, list + p.bad_words_size, p.bad_words_size};
            for (int w = threadIdx.x; w < words.size; w += THREADS) {
                int begin, end;
                if (!words.find(w, begin, end)) continue;
                const unsigned last = words.ids[end - 1] - unsigned(base);
                if (last >= tokens || !ends_with(sequence, length, words.ids + begin, end - 1 - begin)) continue;
                atomicOr(&marks[last], BANNED);
                marked = true;
            }
        }
        const unsigned end_token = p.end_id - unsigned(base);
        if (threadIdx.x == 0 && end_token < tokens && max(generated_to - prompt, 0) < p.min_length.of(row)) {
            atomicOr(&marks[end_token], BANNED);
            marked = true;
        }
        marked = __syncthreads_or(marked);
    }
    // Without contraction to fused multiply-adds, so that each product is rounded, as it is elsewhere.
    const auto penalized = [&](float x, unsigned mark) {
        if (mark & BANNED) return -CUDART_INF_F;
        x = __fmul_rn(x, x > 0.f ? inverse_repetition : repetition);
        const unsigned count = mark & (IN_PROMPT - 1);
        return count ? __fsub_rn(__fsub_rn(x, __fmul_rn(frequency, float(count))), presence) : x;
    };

    if constexpr (WHOLE) {
        // What is smaller than the normal numbers has no finite reciprocal, and an infinity's would make NaN of -inf.
        const float temperature = p.temperature.of(row);
        const bool divides = temperature >= 0x1p-126f && temperature <= LARGEST_FLOAT;
        const float scale = divides ? __fdiv_rn(1.f, temperature) : 1.f;
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            if (column_of(i) >= tokens) continue;
            Packed pack = reinterpret_cast<const Packed&>(packs[i]);
            float x[WIDTH];
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) x[j] = to_float(pack.item[j]);
            if (COUNTED && marked) {
                const auto mark = *reinterpret_cast<const Pack<unsigned, WIDTH>*>(marks + column_of(i));
#pragma unroll
                for (int j = 0; j < WIDTH; ++j)
                    if (mark.item[j]) x[j] = penalized(x[j], mark.item[j]);
            }
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) pack.item[j] = from_float<T>(__fmul_rn(x[j], scale));
            *reinterpret_cast<Packed*>(out + column_of(i)) = pack;
        }
    } else if (marked) {
        for (unsigned i = threadIdx.x; i < tokens; i += THREADS)
            if (marks[i]) out[i] = from_float<T>(penalized(to_float(logits[i]), marks[i]));
    }
}

struct StopWordsParams {
    const int* output_ids;      // [batch, max_length]
    const int* sequence_length; // [batch]
    const int* stop_words;      // [2, stop_words_size] for all rows, or one per row
    unsigned char* finished;    // [batch]
    long long ids_row_stride;
    long long stop_words_stride;
    int batch;
    int max_length;
    int stop_words_size;
};

//   finished[b] |= the sequence ends with one of the words
//
// Grid: a warp per row; lane l tries the words l, l + 32, ...
template <int WARPS_PER_BLOCK>
__global__ void __launch_bounds__(WARPS_PER_BLOCK * 32)
    stop_words_criterion(const __grid_constant__ StopWordsParams p) {
    const int row = blockIdx.x * WARPS_PER_BLOCK + threadIdx.x / 32;
    if (row >= p.batch) return;
    const int* sequence = p.output_ids + row * p.ids_row_stride;
    const int* list = p.stop_words + row * p.stop_words_stride;
    const int length = min(max(p.sequence_length[row], 0), p.max_length);
    const Words words{list, list + p.stop_words_size, p.stop_words_size};
    bool stops = false;
    for (int w = threadIdx.x % 32; w < words.size; w += 32) {
        int begin, end;
        stops = stops || (words.find(w, begin, end) && ends_with(sequence, length, words.ids + begin, end - begin));
    }
    if (__any_sync(FULL_WARP, stops) && threadIdx.x % 32 == 0) p.finished[row] = 1;
}

struct UpdateFinishedParams {
    const int* word_ids;     // [batch]
    unsigned char* finished; // [batch]
    int* sequence_length;    // [batch]
    int batch;
    int end_id;
};

//   sequence_length[b] += not finished[b];   finished[b] |= word_ids[b] == end_id
//
// Grid: a thread per row.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) update_finished(const __grid_constant__ UpdateFinishedParams p) {
    const int row = blockIdx.x * THREADS + threadIdx.x;
    if (row >= p.batch || p.finished[row]) return;
    p.sequence_length[row] += 1;
    p.finished[row] = p.word_ids[row] == p.end_id;
}
