// SPDX-License-Identifier: Apache-2.0
// What stands for "CUDA source of this project" in the GPU table until there is a kernel of its own, which replaces it.
//
// Each warp rounds 32 floats to PRECISION and adds them by shuffles; lane 0 writes the sum. n is a multiple of 32.
// Inputs in [1, 2) make the sum exact in any order: it must be the CPU's to the last bit, with the rounding of PRECISION.
//
// FP8 goes through the chip's own conversion. cuda_fp8.h would emulate it on chips without, and so compile anywhere.

#if defined(PRECISION_BF16)
#include <cuda_bf16.h>
__device__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }
#elif defined(PRECISION_FP16)
#include <cuda_fp16.h>
__device__ float rounded(float value) { return __half2float(__float2half_rn(value)); }
#elif defined(PRECISION_FP8)
__device__ float rounded(float value) {
    unsigned short pair, low, high;
    unsigned int halves;
    float result;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(halves));
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(low));
    return result;
}
#else
#error "define PRECISION_BF16, PRECISION_FP16 or PRECISION_FP8"
#endif

extern "C" __global__ void warp_sum(const float *in, float *out, int n) {
    int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= n) return;
    float sum = rounded(in[index]);
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (index % 32 == 0) out[index / 32] = sum;
}
