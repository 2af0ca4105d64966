// Add the bias to the logits of unfinished sequences, and force end_id for finished sequences.
//
//   out[b, i] = logits[b, i] + bias[i]                    if sequence b is unfinished
//   out[b, i] = i == end_id ? largest : -largest (of T)   if it has finished; its logits are not read
//
// Grid: `slices` blocks per row. A thread handles PACKS packs of WIDTH tokens. A WIDTH above 1 needs aligned rows whose
// length is a multiple of WIDTH.
//
// Speed of light: memory bandwidth; the bias stays in L2. On an H200, 64 rows of 128256 float32 take 19 us (83% of the
// bandwidth of a copy).
#include "common/numeric.cuh"
#include "common/overlap.cuh"
#include "decoding/pack.cuh"

template <typename T> constexpr float LARGEST = LARGEST_FLOAT;
template <> constexpr float LARGEST<__half> = 65504.f;
template <> constexpr float LARGEST<__nv_bfloat16> = 0x1.fep127f;

struct UpdateLogitsParams {
    const void* logits;            // [batch, vocab]  T
    const void* bias;              // [vocab]  T, may be null
    const unsigned char* finished; // [batch], may be null
    void* out;                     // [batch, vocab]  T; may be logits: a thread writes only elements that it reads
    long long row_stride;          // of logits
    long long out_row_stride;
    int vocab;
    int slices; // blocks per row
    int end_id;
};

template <typename T, int WIDTH, int THREADS, int PACKS>
__global__ void __launch_bounds__(THREADS) update_logits(const __grid_constant__ UpdateLogitsParams p) {
    begin_behind_earlier_kernels();
    using Packed = Pack<T, WIDTH>;
    using Raw = RawPack<T, WIDTH>;
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
    // Issue all loads first. The compiler cannot do this, because the stores may alias the loads.
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
