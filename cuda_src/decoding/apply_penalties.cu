// Change the logits by what the sequence already holds, then divide them by the temperature.
//
// With x = logits[b, i], n[i] the count of token i among the generated ones, seen[i] whether it is one of those or of
// the prompt:
//
//   x = seen[i] ? x * (x > 0 ? 1 / repetition : repetition) : x
//   x = n[i] > 0 ? x - frequency * n[i] - presence : x
//   x = -inf   where token i would complete a bad word, or is end_id before min_length tokens were generated
//   out[b, i] = x * (1 / temperature)   (x where the temperature is no positive normal number)
//
// Grid: `slices` blocks per row, each for TOKENS neighbouring tokens of the vocabulary. A block marks what it learns of
// its tokens in a table in shared memory: it walks the row's sequence, whatever its length, and counts with integer
// atomics, whose order does not matter. So each token is penalized once, by one thread, with its exact count.
//
// COUNTED: there may be marks; otherwise the temperature is all there is to apply. WHOLE: all tokens are written;
// otherwise `out` is `logits`, the temperature is 1, and only the marked tokens are read and written.
// WIDTH > 1 needs aligned rows of a multiple of WIDTH tokens.
//
// `logits` and `out` are [batch, vocab], each with a row stride of its own, and may be the same array: the thread that
// writes a logit is the one that has read it.
//
// Speed of light: memory if WHOLE, each logit read once and written once. On an H200 64 rows of 128256 float32 with
// histories of 512 tokens take 20 us, 77% of the speed of a copy of as many bytes. In place the bytes are few, and what
// is left is latency: each block clears its table, then goes through the chain of the length, the sequence, the atomics
// and the marked logits; 14 us for these rows.
#include "common/numeric.cuh"
#include "decoding/pack.cuh"
#include "decoding/words.cuh"

// A parameter that is one number for all rows, or an array of one per row.
template <typename T> struct PerRow {
    const T* values; // null: `value` for all rows
    T value;
    int stride; // 0: one number that lies on the device
    __device__ __forceinline__ T of(int row) const { return values ? values[(long long)row * stride] : value; }
};

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

template <typename T, int WIDTH, int THREADS, int TOKENS, bool COUNTED, bool WHOLE>
__global__ void __launch_bounds__(THREADS) apply_penalties(const __grid_constant__ PenaltyParams p) {
    // A mark is the count, with these bits.
    constexpr unsigned IN_PROMPT = 1u << 30, BANNED = 1u << 31;
    constexpr int PACKS = TOKENS / THREADS / WIDTH;
    constexpr int AT_ONCE = 4; // tokens of the sequence that a thread waits for together
    static_assert(COUNTED || WHOLE, "nothing to do");
    static_assert(TOKENS % (THREADS * WIDTH) == 0 && TOKENS % (THREADS * 4) == 0, "whole packs");
    using Packed = Pack<T, WIDTH>;
    using Raw = RawPack<T, WIDTH>;

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
            const Words words(p.bad_words + row * p.bad_words_stride, p.bad_words_size);
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
