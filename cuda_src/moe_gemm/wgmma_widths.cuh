// wgmma for every width N.
#pragma once
#include "moe_gemm/wgmma_layout.cuh"

// N of wgmma, in tokens. A kernel instance uses the widths from TOKENS / 4 to TOKENS.
constexpr int WIDTHS[] = {8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 224, 240, 256, 272, 288};

// Descriptor of an MN-major operand A.
struct MMajor {
    unsigned long long descriptor;
};

template <int WIDTH> struct Width {
    static constexpr int value = WIDTH;
};

// Macros like REGISTERS_n in common/hopper.cuh, for more widths. PLACES_n lists n registers for a width of `2 * n`
// columns.
#define FOUR(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define PLACES_24 EIGHT(0), EIGHT(8), EIGHT(16)
#define PLACES_40 PLACES_24, EIGHT(24), EIGHT(32)
#define PLACES_48 PLACES_40, EIGHT(40)
#define PLACES_80 PLACES_48, EIGHT(48), EIGHT(56), EIGHT(64), EIGHT(72)
#define PLACES_96 PLACES_80, EIGHT(80), EIGHT(88)
#define PLACES_112 PLACES_96, EIGHT(96), EIGHT(104)
#define PLACES_120 PLACES_112, EIGHT(112)
#define NAMES_24 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_40 NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_48 NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_80 \
    NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
             "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_96 NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_112 \
    NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_120 NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define PRODUCT(columns, places, types, a_at, b_at, add_at, how, ...) \
    asm volatile("{ .reg .pred add;\n" \
                 "  setp.ne.b32 add, " add_at ", 0;\n" \
                 "  wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." types " {" NAMES_##places \
                 "}, " a_at ", " b_at ", add, 1, 1, " how "; }" \
                 : PLACES_##places \
                 : __VA_ARGS__, "l"(b), "r"(int(add)))
#define OF_SHARED(columns, places, types, a_at, b_at, add_at) \
    do { \
        if constexpr (M_MAJOR) \
            PRODUCT(columns, places, types, a_at, b_at, add_at, "1, 0", "l"(a)); \
        else \
            PRODUCT(columns, places, types, a_at, b_at, add_at, "0, 0", "l"(a)); \
    } while (0)
#define OF_REGISTERS(columns, places, types, a_at, b_at, add_at) \
    PRODUCT(columns, places, types, a_at, b_at, add_at, "0", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]))
#define PRODUCTS_OF_SHARED(types) \
    if constexpr (N == 24) \
        OF_SHARED("48", 24, types, "%24", "%25", "%26"); \
    else if constexpr (N == 40) \
        OF_SHARED("80", 40, types, "%40", "%41", "%42"); \
    else if constexpr (N == 48) \
        OF_SHARED("96", 48, types, "%48", "%49", "%50"); \
    else if constexpr (N == 80) \
        OF_SHARED("160", 80, types, "%80", "%81", "%82"); \
    else if constexpr (N == 96) \
        OF_SHARED("192", 96, types, "%96", "%97", "%98"); \
    else if constexpr (N == 112) \
        OF_SHARED("224", 112, types, "%112", "%113", "%114"); \
    else if constexpr (N == 120) \
        OF_SHARED("240", 120, types, "%120", "%121", "%122"); \
    else if constexpr (M_MAJOR) \
        wgmma_m_major<T>(c, a, b, add); \
    else \
        wgmma_k_major<T>(c, a, b, add)
#define PRODUCTS_OF_REGISTERS(types) \
    if constexpr (N == 24) \
        OF_REGISTERS("48", 24, types, "{%24, %25, %26, %27}", "%28", "%29"); \
    else if constexpr (N == 40) \
        OF_REGISTERS("80", 40, types, "{%40, %41, %42, %43}", "%44", "%45"); \
    else if constexpr (N == 48) \
        OF_REGISTERS("96", 48, types, "{%48, %49, %50, %51}", "%52", "%53"); \
    else if constexpr (N == 80) \
        OF_REGISTERS("160", 80, types, "{%80, %81, %82, %83}", "%84", "%85"); \
    else if constexpr (N == 96) \
        OF_REGISTERS("192", 96, types, "{%96, %97, %98, %99}", "%100", "%101"); \
    else if constexpr (N == 112) \
        OF_REGISTERS("224", 112, types, "{%112, %113, %114, %115}", "%116", "%117"); \
    else if constexpr (N == 120) \
        OF_REGISTERS("240", 120, types, "{%120, %121, %122, %123}", "%124", "%125"); \
    else \
        wgmma_k_major<T>(c, a, b, add)
template <typename T, int N>
__device__ __forceinline__ void multiply_width(float (&c)[N], unsigned long long a, unsigned long long b, bool add) {
    constexpr bool M_MAJOR = false;
    if constexpr (IS_BFLOAT16<T>) {
        PRODUCTS_OF_SHARED("bf16.bf16");
    } else {
        PRODUCTS_OF_SHARED("f16.f16");
    }
}

template <typename T, int N>
__device__ __forceinline__ void multiply_width(float (&c)[N], MMajor operand, unsigned long long b, bool add) {
    constexpr bool M_MAJOR = true;
    const unsigned long long a = operand.descriptor;
    if constexpr (IS_BFLOAT16<T>) {
        PRODUCTS_OF_SHARED("bf16.bf16");
    } else {
        PRODUCTS_OF_SHARED("f16.f16");
    }
}

template <typename T, int N>
__device__ __forceinline__ void multiply_width(float (&c)[N], const unsigned (&a)[4], unsigned long long b, bool add) {
    if constexpr (IS_BFLOAT16<T>) {
        PRODUCTS_OF_REGISTERS("bf16.bf16");
    } else {
        PRODUCTS_OF_REGISTERS("f16.f16");
    }
}
#undef FOUR
#undef EIGHT
#undef PLACES_24
#undef PLACES_40
#undef PLACES_48
#undef PLACES_80
#undef PLACES_96
#undef PLACES_112
#undef PLACES_120
#undef NAMES_24
#undef NAMES_40
#undef NAMES_48
#undef NAMES_80
#undef NAMES_96
#undef NAMES_112
#undef NAMES_120
#undef PRODUCT
#undef OF_SHARED
#undef OF_REGISTERS
#undef PRODUCTS_OF_SHARED
#undef PRODUCTS_OF_REGISTERS

// Compute the first WIDTH columns of `c += a * b`, or of `c = a * b` if `add` is false, for 16 elements along k. A
// wgmma has at most 256 columns, so a larger WIDTH takes two. `a`: a descriptor, or fragments in registers.
template <typename T, int WIDTH, int REGISTERS, typename A>
__device__ __forceinline__ void multiply_step(float (&c)[REGISTERS], const A& a, unsigned long long b, bool add) {
    constexpr int FIRST = WIDTH < 256 ? WIDTH : 256;
    multiply_width<T>(reinterpret_cast<float (&)[FIRST / 2]>(c), a, b, add);
    if constexpr (FIRST < WIDTH)
        multiply_width<T>(reinterpret_cast<float (&)[(WIDTH - FIRST) / 2]>(c[FIRST / 2]), a,
                          b + (FIRST * ROW_BYTES >> 4), add);
}

// Call `f(Width<w>())` with the smallest width w of this kernel instance that is at least `tokens`.
template <int TOKENS, int I = 0, typename F> __device__ __forceinline__ void with_width(int tokens, const F& f) {
    constexpr int WIDTH = WIDTHS[I];
    if constexpr (WIDTH == TOKENS)
        f(Width<WIDTH>());
    else if (WIDTH * 4 >= TOKENS && tokens <= WIDTH)
        f(Width<WIDTH * 4 >= TOKENS ? WIDTH : TOKENS>());
    else
        with_width<TOKENS, I + 1>(tokens, f);
}
