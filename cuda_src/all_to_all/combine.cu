// Send the experts' output rows over NVLink back to the ranks that own the tokens, and sum them there.
//
//   partial[d, t] = sum over the slots s of token t on rank d, in order, of weights[s] * src[inverse[s]]
//   out[t]        = sum over the ranks d that have an expert of token t, in order, of partial[d, t]
//
// A slot is one of a token's `topk` (token, expert) pairs. Sums are in float32, and `partial` is rounded to T before it
// is sent. If MODE is SUMMED, the caller has computed `partial`. If it is BY_SLOT, this kernel computes `partial`. If
// it is APART, each slot's row is sent separately, and `out[t]` sums `weights[s] * src[inverse[s]]` over all slots of
// the token, in order, with the same bits for any number of ranks.
//
// Grid: blocks of 256 threads, all resident. A block handles one chunk of a token's row at a time. The source of a
// token is the rank that owns it. The first `senders` blocks store the chunks of other ranks' tokens into the source's
// window (its memory that all ranks can write to), and then set a flag there. A source with few tokens gets lines,
// which need no flags (all_to_all/lines.cuh). The other blocks add the partials of this rank and of other ranks for
// this rank's tokens.
//
// Speed of light: with many tokens the kernel is bound by the bandwidth to the peers, because each token's row crosses
// NVLink once per other rank that has one of its experts. With few tokens it is bound by the latency of a store to a
// peer. On two H200s, with rows of 7168 bfloat16, 4096 tokens per rank take 186 us with SUMMED, which is 86% of the
// bandwidth of plain stores to the peer, and 253 us with BY_SLOT. 128 tokens take 11.1 us (SUMMED) and 12.9 us
// (BY_SLOT); 8 tokens take 4.5 us and 5.6 us.
#include "all_to_all/contribution.cuh"
#include "all_to_all/writer.cuh"

// Return the index of a received row in the source's window. `summand` is the slot if APART, else the sending rank.
template <int MODE> __device__ __forceinline__ long long row_of(const Params& p, int token, int summand) {
    return MODE == APART ? (long long)token * p.topk + summand : (long long)summand * p.max_tokens + token;
}

template <int VECTORS>
__device__ __forceinline__ Flags<VECTORS> flags_of(const Params& p, int rank, long long row, int chunk) {
    return {reinterpret_cast<unsigned*>(p.ranks.windows[rank] + p.flags_at) + row * p.flags +
            chunk * (VECTORS / FLAG_VECTORS)};
}

// Return the address of a lane's i-th line of a chunk, or null past the end of the row.
template <int VECTORS>
__device__ __forceinline__ char* line_at(const Params& p, int source, int token, int rank, int chunk, int i) {
    const int line = chunk * (VECTORS * LINES_PER_BLOCK) + line_of(i);
    const long long row = (long long)rank * p.line_tokens + token;
    return line < p.lines ? p.ranks.windows[source] + p.lines_at + (row * p.lines + line) * LINE_BYTES : nullptr;
}

// One chunk to send to the source of a token. With APART, it is a chunk of one slot's row.
struct SendItem {
    unsigned index;
    int source, token, summand, chunk;
    Slots slots;

    __device__ __forceinline__ long long place(const Params& p) const {
        return (long long)source * p.max_tokens + token;
    }

    template <int MODE> __device__ __forceinline__ unsigned slot_mask(const Params& p) const {
        const unsigned local_slots = slots.local_slots(p);
        return MODE == APART ? local_slots & 1u << summand : local_slots;
    }
};

// Consecutive items have different sources, and each rank begins with a different source, so that the ranks do not all
// send to the same rank.
template <int MODE> __device__ __forceinline__ SendItem send_item(const Params& p, unsigned index) {
    const unsigned other_ranks = p.ranks.ranks - 1;
    SendItem item = {index};
    item.chunk = index % p.chunks, index /= p.chunks;
    item.summand = p.ranks.rank;
    if (MODE == APART) item.summand = index % p.topk, index /= p.topk;
    item.source = (p.ranks.rank + 1 + index % other_ranks) % p.ranks.ranks;
    item.token = index / other_ranks;
    // The arrays have space for max_tokens tokens of each source, so the loads need not wait for the number of tokens.
    if (item.token < p.max_tokens) item.slots = Slots::load<MODE>(p, item.place(p));
    return item;
}

template <typename T, int MODE, int VECTORS>
__device__ __forceinline__ void send(const Params& p, unsigned long long step) {
    __shared__ alignas(128) uint4 stages[STAGES][CHUNK<VECTORS>];
    const unsigned epoch = unsigned(step + 1);
    SendItem next = send_item<MODE>(p, blockIdx.x);
    const int* const tokens = p.ranks.progress->tokens;
    int most_tokens = 0;
    for (int rank = 0; rank < p.ranks.ranks; ++rank)
        if (rank != p.ranks.rank) most_tokens = max(most_tokens, tokens[rank]);
    const unsigned end = most_tokens * (p.ranks.ranks - 1) * (MODE == APART ? p.topk : 1) * p.chunks;
    ChunkWriter<VECTORS> writer(stages, epoch);
    while (next.index < end) {
        const SendItem item = next;
        const unsigned slot_mask = item.slot_mask<MODE>(p);
        next = {item.index + p.senders};
        if (next.index < end) next = send_item<MODE>(p, next.index);
        if (item.token >= tokens[item.source] || !slot_mask) continue;
        const int first = item.chunk * CHUNK<VECTORS>;
        uint4 value[VECTORS];
        compute_partial<T, MODE>(value, p, item.slots, slot_mask, item.place(p), first);
        // If a slot has no row, stop before the flags are set, so that no receiver reads an incomplete row.
        if (MODE != SUMMED && __syncthreads_or(!item.slots.have_rows<MODE>(p, slot_mask, step))) break;
        if (MODE != APART && tokens[item.source] <= p.line_tokens) {
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
                if (char* const line = line_at<VECTORS>(p, item.source, item.token, item.summand, item.chunk, i))
                    store_line(line, value[i], epoch);
        } else {
            char* const window = p.ranks.windows[item.source];
            const long long row = row_of<MODE>(p, item.token, item.summand);
            writer.write(reinterpret_cast<uint4*>(window + p.partial_at) + row * p.vectors + first, value,
                         min(CHUNK<VECTORS>, p.vectors - first), flags_of<VECTORS>(p, item.source, row, item.chunk));
        }
    }
    writer.finish();
}

// The summands of a token of this rank: slots if APART, else the partials of ranks. Masks have one bit per summand.
struct Summands {
    unsigned all, local; // mask of all summands, and of those that this rank computes
    int rank;            // in lane i, the rank of summand i
    float weight;        // in lane i, the weight of slot i if APART, else 1
};

// One chunk of the output of a token of this rank.
struct ReceiveItem {
    unsigned index;
    int token, chunk;
    int id = -1;        // in lane k, the expert of slot k
    float weight = 1.f; // in lane k, the weight of slot k; APART only
    Slots slots;        // the row and weight of each slot, if its expert is on this rank

    // Start the loads of an item. The first use of a loaded value waits for its load.
    template <int MODE, typename ID>
    static __device__ __forceinline__ ReceiveItem load(const Params& p, unsigned index) {
        ReceiveItem item = {index, int(index / p.chunks), int(index % p.chunks)};
        if (item.token >= p.tokens) return item;
        const int lane = threadIdx.x % 32;
        if (lane < p.topk) {
            const long long at = (long long)item.token * p.topk + lane;
            const ID id = static_cast<const ID*>(p.topk_ids)[at];
            // The range of the id is checked here, because keeping a 64-bit id until its use would take more registers.
            item.id = sizeof(ID) == sizeof(int) || id < ID(p.ranks.experts) ? int(id) : -1;
            if (MODE == APART && p.weighted) item.weight = p.weights[at];
        }
        item.slots = Slots::load<MODE>(p, (long long)p.ranks.rank * p.max_tokens + item.token);
        return item;
    }

    template <int MODE> __device__ __forceinline__ Summands summands(const Params& p) const {
        const int owner = p.ranks.owner(unsigned(id));
        if constexpr (MODE == APART)
            return {__ballot_sync(FULL_WARP, owner >= 0), __ballot_sync(FULL_WARP, owner == p.ranks.rank), owner,
                    weight};
        const unsigned all = __reduce_or_sync(FULL_WARP, owner >= 0 ? 1u << owner : 0u);
        return {all, all & 1u << p.ranks.rank, int(threadIdx.x % 32), 1.f};
    }
};

// Return, in all lanes, whether the chunk has arrived in all rows that other ranks send for the token.
template <int MODE, int VECTORS>
__device__ __forceinline__ bool wait_for_chunk(const Params& p, const Summands& summands, int token, int chunk,
                                               unsigned long long step) {
    const int lane = threadIdx.x % 32, flag_count = p.vectors - chunk * CHUNK<VECTORS> > CHUNK<FLAG_VECTORS> ? 2 : 1;
    bool arrived = true;
    if ((summands.all & ~summands.local) >> lane & 1) {
        const auto flags = flags_of<VECTORS>(p, p.ranks.rank, row_of<MODE>(p, token, lane), chunk);
        arrived = wait_for(p.ranks, summands.rank, COMBINE, step,
                           [&] { return flags.are_set(unsigned(step + 1), flag_count); });
    }
    return __all_sync(FULL_WARP, arrived);
}

// Return, in all lanes, whether all lines of the chunk have arrived.
template <int VECTORS>
__device__ __forceinline__ bool receive_lines(uint4 (&value)[VECTORS], const Params& p, int token, int rank, int chunk,
                                              unsigned long long step) {
    return wait_for<true>(p.ranks, rank, COMBINE, step, [&] {
        bool arrived = true;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (const char* const line = line_at<VECTORS>(p, p.ranks.rank, token, rank, chunk, i))
                arrived &= load_line(value[i], line, unsigned(step + 1));
        return __all_sync(FULL_WARP, arrived);
    });
}

template <typename T, int MODE, int VECTORS>
__device__ __forceinline__ void receive(const Params& p, const ReceiveItem& item, unsigned long long step) {
    const uint4* const partial = reinterpret_cast<const uint4*>(p.ranks.windows[p.ranks.rank] + p.partial_at);
    const int token = item.token, chunk = item.chunk, first = chunk * CHUNK<VECTORS>;
    const long long place = (long long)p.ranks.rank * p.max_tokens + token;
    const bool lines = MODE != APART && p.tokens <= p.line_tokens;
    const Summands summands = item.summands<MODE>(p);
    const Slots& slots = item.slots;
    const unsigned local_slots = slots.local_slots(p);
    bool arrived =
        slots.have_rows<MODE>(p, local_slots, step) && !__any_sync(FULL_WARP, load_volatile(p.ranks.progress->failed));
    uint4 local[VECTORS] = {};
    if (MODE != APART && summands.local) compute_partial<T, MODE>(local, p, slots, local_slots, place, first);
    if (!lines && arrived) arrived = wait_for_chunk<MODE, VECTORS>(p, summands, token, chunk, step);
    float sum[VECTORS][8] = {};
    for (unsigned remaining = summands.all; remaining && arrived; remaining &= remaining - 1) {
        const int summand = __ffs(remaining) - 1;
        const bool is_local = summands.local >> summand & 1;
        uint4 value[VECTORS] = {};
        if (MODE == APART && is_local)
            compute_partial<T, MODE>(value, p, slots, 1u << summand, place, first);
        else if (!is_local && lines)
            arrived = receive_lines(value, p, token, summand, chunk, step);
        else if (!is_local)
            load_chunk(value, partial + row_of<MODE>(p, token, summand) * p.vectors, first, p.vectors);
        const float weight = MODE == APART ? __shfl_sync(FULL_WARP, summands.weight, summand) : 1.f;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) add<T>(sum[i], MODE != APART && is_local ? local[i] : value[i], weight);
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int vector = first + vector_of(i);
#pragma unroll
        for (int n = 0; n < 8; ++n)
            if (!arrived) sum[i][n] = CUDART_NAN_F;
        if (has_vector() && vector < p.vectors)
            static_cast<uint4*>(p.out)[(long long)token * p.vectors + vector] = rounded<T>(sum[i]);
    }
}

// T: element type of the rows. ID: type of an expert id. It is unsigned, so that a negative id compares greater than
// all experts.
template <typename T, typename ID, int MODE, int VECTORS, int PHASES>
__global__ void __launch_bounds__(THREADS, MODE == BY_SLOT || VECTORS > FLAG_VECTORS ? RESIDENT_LARGE : RESIDENT)
    combine_tokens(const __grid_constant__ Params p) {
    Progress& progress = *p.ranks.progress;
    const unsigned long long step = progress.combines;
    const int senders = PHASES & SEND ? p.senders : 0;
    bool failed = false;
    if (threadIdx.x == 0) {
        failed = load_volatile(progress.failed);
        if (load_volatile(progress.buffer) != p.buffer) {
            fail(p.ranks, OTHER_CALL, p.ranks.rank, COMBINE, step);
            failed = true;
        }
    }
    failed = __syncthreads_or(failed);
    if ((PHASES & RECEIVE) && threadIdx.x == THREADS - 1 && is_last_block(progress)) progress.combines = step + 1;
    if ((PHASES & SEND) && int(blockIdx.x) < senders) {
        if (!failed) send<T, MODE, VECTORS>(p, step);
    } else if constexpr (PHASES & RECEIVE) {
        const unsigned items = p.tokens * p.chunks, receivers = gridDim.x - senders;
        ReceiveItem next = ReceiveItem::load<MODE, ID>(p, blockIdx.x - senders);
        while (next.index < items) {
            const ReceiveItem item = next;
            // The next loads overlap with the wait for this item.
            next = ReceiveItem::load<MODE, ID>(p, item.index + receivers);
            receive<T, MODE, VECTORS>(p, item, step);
        }
    }
}
