// Kernels to try the emulator on: right ones, and ones with the faults that it has to find.
#pragma once
#include <cstdint>

struct CUstream_st;

namespace cuda_emu::examples {

using Stream = CUstream_st*;

void add_one(float* x, int n, Stream stream);
void copy_strided(float* to, const float* from, int n, int stride, Stream stream);  // to[i] = from[i stride]
void copy_by_four(float* to, const float* from, int n, Stream stream);              // n: a multiple of 4
void transpose(float* to, const float* from, int rows, int cols, Stream stream);
void block_sums(float* sums, const float* x, int blocks, int threads, Stream stream);  // by shuffles
void rotate_in_warp(int* to, int by, Stream stream);      // one warp; to[l] = (l + by) % 32
void votes(int* to, const int* x, int n, Stream stream);  // one block: [any, all, ballot of warp 0]
void count_atomically(int* to, int blocks, int threads, Stream stream);
void count_in_block(int* to, int threads, Stream stream);      // one block; atomics on shared memory
void agree(int* to, int threads, int against, Stream stream);  // one warp: do all, each thread but one, vote yes?
void dynamic_reverse(float* x, int n, Stream stream);          // one block
void too_many_threads(float* x, Stream stream);
bool let_share(int bytes);                               // for share: the limit of its dynamic shared memory
void share(float* x, int dynamic_bytes, Stream stream);  // one block, which stores a sum
void share_with_static(float* x, int dynamic_bytes, Stream stream);  // and 40 KiB of static shared memory
// C = A B of 16 x 16 matrices, rounded to bf16, by one warp; transposed: b is B^T.
enum class Right { Plain, Transposed };
void tensor_cores(float* c, const float* a, const float* b, Right right, Stream stream);
void whole_block_index(int* to, Stream stream);  // grid (2, 3), block (4, 2): to[i] counts visits of linear thread i

void missing_syncthreads(float* to, const float* from, int n, Stream stream);
void missing_syncwarp(float* to, const float* from, Stream stream);
void barrier_in_branch(float* x, Stream stream);
void two_barriers(float* x, Stream stream);
void shuffle_in_branch(float* x, Stream stream);
void shuffle_outside_mask(float* x, Stream stream);
void reads_uninitialised_shared(float* to, Stream stream);
void store_past_end(float* x, int n, Stream stream);
void plain_store_past_end(float* x, int n, Stream stream);  // without store()
void load_misaligned(float* to, const float* from, Stream stream);
void fault_before_barrier(float* x, int n, Stream stream);
void atomic_past_end(float* x, int n, Stream stream);
void shuffle_from_missing_lane(int* to, Stream stream);
void tensor_cores_of_half_a_warp(float* c, Stream stream);
void matrix_outside_shared_memory(float* to, Stream stream);
void misaligned_matrix(float* to, Stream stream);
void race_between_blocks(float* x, int blocks, Stream stream);

}  // namespace cuda_emu::examples
