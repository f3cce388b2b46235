/* Every public name that programs outside of this repository may use, with its exact type: a change of one
   breaks them, and this file. It compiles as C, C++ and CUDA. Its main checks values of constants and the
   meaning of zero. */
#define DDP_IMPLEMENTATION
#include "ddp.h"
#include "ddp_fsdp.h"
#include "ddp_pipeline.h"
#include "ddp_tensor.h"
#if defined(__CUDACC__)
#include "ddp_cuda.cuh"
#endif
#include <stdio.h>
#include <string.h>

/* A pointer of the promised type to a function, or to a member: the compiler refuses any other one. Not
   static, so that none is unused. */
#define FUNCTION(name, result, arguments) result(*check_##name) arguments = name
#define FIELD(type, member, of) \
    void check_##type##_##member(type *desc, of **out) { *out = &desc->member; }

//== ddp.h ====================================================================================================

FUNCTION(ddp_result_name, const char *, (ddp_result));
FUNCTION(ddp_last_error, const char *, (void));

static ddp_result rank_function(ddp_group *world, void *user) {
    return (void)user, ddp_world_size(world) ? DDP_OK : DDP_ERR_INVALID;
}
ddp_rank_fn check_ddp_rank_fn = rank_function;
FUNCTION(ddp_launch, ddp_result, (const ddp_launch_desc *, ddp_rank_fn, void *));
FUNCTION(ddp_group_create, ddp_result, (ddp_group **, const ddp_group_desc *));
#if defined(DDP_USE_MPI)
FUNCTION(ddp_group_from_mpi, ddp_result, (ddp_group **, MPI_Comm, const ddp_group_desc *));
#endif
FUNCTION(ddp_group_split, ddp_result, (ddp_group *, int, int, ddp_group **));
FUNCTION(ddp_group_status, ddp_result, (const ddp_group *));
FUNCTION(ddp_group_abort, ddp_result, (ddp_group *));
FUNCTION(ddp_group_destroy, void, (ddp_group *));
FUNCTION(ddp_rank, int, (const ddp_group *));
FUNCTION(ddp_world_size, int, (const ddp_group *));
FUNCTION(ddp_local_rank, int, (const ddp_group *));
FUNCTION(ddp_local_world_size, int, (const ddp_group *));
FUNCTION(ddp_group_attempt, int, (const ddp_group *));
FUNCTION(ddp_mesh_create, ddp_result, (ddp_mesh **, ddp_group *, const ddp_mesh_desc *));
FUNCTION(ddp_mesh_group, ddp_group *, (ddp_mesh *, const char *));
FUNCTION(ddp_mesh_destroy, void, (ddp_mesh *));

FUNCTION(ddp_all_reduce, ddp_result,
         (ddp_group *, const void *, void *, size_t, ddp_dtype, ddp_op, ddp_work *));
FUNCTION(ddp_reduce, ddp_result,
         (ddp_group *, const void *, void *, size_t, ddp_dtype, ddp_op, int, ddp_work *));
FUNCTION(ddp_broadcast, ddp_result, (ddp_group *, void *, size_t, ddp_dtype, int, ddp_work *));
FUNCTION(ddp_all_gather, ddp_result, (ddp_group *, const void *, void *, size_t, ddp_dtype, ddp_work *));
FUNCTION(ddp_reduce_scatter, ddp_result,
         (ddp_group *, const void *, void *, size_t, ddp_dtype, ddp_op, ddp_work *));
FUNCTION(ddp_all_to_all, ddp_result, (ddp_group *, const void *, void *, size_t, ddp_dtype, ddp_work *));
FUNCTION(ddp_gather, ddp_result, (ddp_group *, const void *, void *, size_t, ddp_dtype, int, ddp_work *));
FUNCTION(ddp_scatter, ddp_result, (ddp_group *, const void *, void *, size_t, ddp_dtype, int, ddp_work *));
FUNCTION(ddp_all_gather_v, ddp_result,
         (ddp_group *, const void *, size_t, void *, const size_t *, const size_t *, ddp_dtype, ddp_work *));
FUNCTION(ddp_all_to_all_v, ddp_result,
         (ddp_group *, const void *, const size_t *, const size_t *, void *, const size_t *, const size_t *,
          ddp_dtype, ddp_work *));
FUNCTION(ddp_send, ddp_result, (ddp_group *, const void *, size_t, ddp_dtype, int, int, ddp_work *));
FUNCTION(ddp_recv, ddp_result, (ddp_group *, void *, size_t, ddp_dtype, int, int, ddp_work *));
FUNCTION(ddp_barrier, ddp_result, (ddp_group *));
FUNCTION(ddp_p2p_begin, ddp_result, (ddp_group *));
FUNCTION(ddp_p2p_end, ddp_result, (ddp_group *));
FUNCTION(ddp_wait, ddp_result, (ddp_group *, ddp_work *));
FUNCTION(ddp_test, ddp_result, (ddp_group *, ddp_work *, int *));
FUNCTION(ddp_group_alloc, ddp_result, (ddp_group *, size_t, void **));
FUNCTION(ddp_group_free, ddp_result, (ddp_group *, void *));

FUNCTION(ddp_reducer_create, ddp_result, (ddp_reducer **, ddp_group *, const ddp_reducer_desc *));
FUNCTION(ddp_reducer_ready, ddp_result, (ddp_reducer *, int));
FUNCTION(ddp_reducer_wait, ddp_result, (ddp_reducer *));
FUNCTION(ddp_reducer_no_sync, ddp_result, (ddp_reducer *, int));
FUNCTION(ddp_reducer_sync_buffers, ddp_result, (ddp_reducer *, int));
FUNCTION(ddp_seed, uint64_t, (uint64_t, uint64_t, int64_t, uint64_t));
FUNCTION(ddp_reducer_get_stats, ddp_result, (const ddp_reducer *, ddp_reducer_stats *));
FUNCTION(ddp_reducer_destroy, void, (ddp_reducer *));
FUNCTION(ddp_accumulator_create, ddp_result, (ddp_accumulator **, ddp_group *, const ddp_accumulator_desc *));
FUNCTION(ddp_accumulator_ready, ddp_result, (ddp_accumulator *, int));
FUNCTION(ddp_accumulator_next, ddp_result, (ddp_accumulator *, int *));
FUNCTION(ddp_accumulator_destroy, void, (ddp_accumulator *));
FUNCTION(ddp_join_create, ddp_result, (ddp_join **, ddp_group *, const ddp_join_desc *));
FUNCTION(ddp_join_step, ddp_result, (ddp_join *, int, int *));
FUNCTION(ddp_join_destroy, void, (ddp_join *));

FUNCTION(ddp_sampler_init, ddp_result, (ddp_sampler *, const ddp_sampler_desc *));
FUNCTION(ddp_sampler_set_epoch, void, (ddp_sampler *, uint64_t));
FUNCTION(ddp_sampler_batch_size, int64_t, (const ddp_sampler *));
FUNCTION(ddp_sampler_length, int64_t, (const ddp_sampler *));
FUNCTION(ddp_sampler_next, int64_t, (ddp_sampler *, int *));
FUNCTION(ddp_sampler_save, ddp_result, (const ddp_sampler *, ddp_sampler_state *));
FUNCTION(ddp_sampler_load, ddp_result, (ddp_sampler *, const ddp_sampler_state *));
FUNCTION(ddp_sampler_free, void, (ddp_sampler *));
FUNCTION(ddp_loader_create, ddp_result, (ddp_loader **, const ddp_loader_desc *));
FUNCTION(ddp_loader_next, ddp_result, (ddp_loader *, ddp_batch *));
FUNCTION(ddp_loader_destroy, void, (ddp_loader *));

FIELD(ddp_tensor, data, void *)
FIELD(ddp_tensor, dtype, ddp_dtype)
FIELD(ddp_tensor, ndim, int)
FIELD(ddp_param, name, const char *)
FIELD(ddp_param, value, ddp_tensor)
FIELD(ddp_param, grad, ddp_tensor)
FIELD(ddp_param, sum, ddp_grad_sum)
FIELD(ddp_launch_desc, world_size, int)
FIELD(ddp_launch_desc, mode, ddp_launch_mode)
FIELD(ddp_launch_desc, max_restarts, int)
FIELD(ddp_launch_desc, devices, const int *)
FIELD(ddp_launch_desc, device_count, int)
FIELD(ddp_launch_desc, group, ddp_group_desc)
FIELD(ddp_group_desc, init_method, const char *)
FIELD(ddp_group_desc, rank, int)
FIELD(ddp_group_desc, world_size, int)
FIELD(ddp_group_desc, timeout_ms, int)
FIELD(ddp_group_desc, order, ddp_order)
FIELD(ddp_group_desc, name, const char *)
FIELD(ddp_group_desc, backend, const ddp_backend *)
FIELD(ddp_group_desc, device, const ddp_device *)
FIELD(ddp_group_desc, user, void *)
FIELD(ddp_mesh_desc, ndim, int)
FIELD(ddp_reducer_desc, params, ddp_param *)
FIELD(ddp_reducer_desc, param_count, int)
FIELD(ddp_reducer_desc, bucket_cap_bytes, size_t)
FIELD(ddp_reducer_desc, first_bucket_bytes, size_t)
FIELD(ddp_reducer_desc, find_unused, int)
FIELD(ddp_reducer_desc, static_graph, int)
FIELD(ddp_reducer_desc, comm_dtype, ddp_dtype)
FIELD(ddp_reducer_desc, hook, ddp_bucket_hook)
FIELD(ddp_reducer_desc, hook_user, void *)
FIELD(ddp_reducer_desc, skip_initial_broadcast, int)
FIELD(ddp_reducer_desc, buffers, const ddp_tensor *)
FIELD(ddp_reducer_desc, buffer_count, int)
FIELD(ddp_sampler_desc, dataset_size, int64_t)
FIELD(ddp_sampler_desc, num_replicas, int)
FIELD(ddp_sampler_desc, rank, int)
FIELD(ddp_sampler_desc, seed, uint64_t)
FIELD(ddp_sampler_desc, no_shuffle, int)
FIELD(ddp_sampler_desc, drop_last, int)
FIELD(ddp_sampler_desc, shuffle, ddp_shuffle)
FIELD(ddp_sampler_desc, no_pad, int)
FIELD(ddp_sampler_desc, global_batch, int64_t)
FIELD(ddp_sampler_desc, weights, const double *)
FIELD(ddp_sampler_state, seed, uint64_t)
FIELD(ddp_sampler_state, epoch, uint64_t)
FIELD(ddp_sampler_state, position, int64_t)

/* Arrays and pointers to functions: a member of the promised type may be assigned. */
void check_arrays(ddp_tensor *tensor, int64_t (**shape)[DDP_MAX_NDIM], ddp_mesh_desc *mesh,
                  int (**sizes)[DDP_MAX_NDIM], const char *(**names)[DDP_MAX_NDIM]) {
    *shape = &tensor->shape, *sizes = &mesh->shape, *names = &mesh->names;
}
void check_callbacks(ddp_group_desc *desc, void *(*alloc_fn)(size_t, void *), void (*free_fn)(void *, void *),
                     void (*log_fn)(const char *, void *)) {
    desc->alloc_fn = alloc_fn, desc->free_fn = free_fn, desc->log_fn = log_fn;
}

//== ddp_fsdp.h ===============================================================================================

FUNCTION(ddp_fsdp_create, ddp_result, (ddp_fsdp **, ddp_group *, const ddp_fsdp_desc *));
FUNCTION(ddp_fsdp_unshard, ddp_result, (ddp_fsdp *, int));
FUNCTION(ddp_fsdp_reshard, ddp_result, (ddp_fsdp *, int));
FUNCTION(ddp_fsdp_reduce_grads, ddp_result, (ddp_fsdp *, int));
FUNCTION(ddp_fsdp_clip_grad_norm, ddp_result, (ddp_fsdp *, float, float *));
FUNCTION(ddp_fsdp_step, ddp_result, (ddp_fsdp *, float));
FUNCTION(ddp_fsdp_save, ddp_result, (ddp_fsdp *, const char *));
FUNCTION(ddp_fsdp_load, ddp_result, (ddp_fsdp *, const char *));
FUNCTION(ddp_fsdp_sync_buffers, ddp_result, (ddp_fsdp *, int));
FUNCTION(ddp_fsdp_get_full, ddp_result, (ddp_fsdp *, int, int, int, ddp_tensor *));
FUNCTION(ddp_fsdp_export, ddp_result, (ddp_fsdp *, const char *));
FUNCTION(ddp_fsdp_get_memory, ddp_result, (const ddp_fsdp *, ddp_fsdp_memory *));
FUNCTION(ddp_fsdp_predict, ddp_result, (const ddp_fsdp_desc *, int, ddp_fsdp_bytes *));
FUNCTION(ddp_fsdp_destroy, void, (ddp_fsdp *));
FUNCTION(ddp_fsdp_wrap, int, (const ddp_param *, int, const ddp_fsdp_wrap_desc *, ddp_fsdp_unit_desc *, int));
FUNCTION(ddp_scaler_init, ddp_result, (ddp_scaler *, const ddp_scaler_desc *));
FUNCTION(ddp_scaler_update, ddp_result, (ddp_scaler *));
FUNCTION(ddp_optimizer_create, ddp_result, (ddp_optimizer **, ddp_group *, const ddp_optimizer_desc *));
FUNCTION(ddp_optimizer_step, ddp_result, (ddp_optimizer *, float));
FUNCTION(ddp_optimizer_destroy, void, (ddp_optimizer *));
FUNCTION(ddp_lr_at, float, (const ddp_lr_desc *, int64_t));

FIELD(ddp_fsdp_desc, units, ddp_fsdp_unit_desc *)
FIELD(ddp_fsdp_desc, unit_count, int)
FIELD(ddp_fsdp_desc, strategy, ddp_fsdp_strategy)
FIELD(ddp_fsdp_desc, replicas, ddp_group *)
FIELD(ddp_fsdp_desc, param_dtype, ddp_dtype)
FIELD(ddp_fsdp_desc, reduce_dtype, ddp_dtype)
FIELD(ddp_fsdp_desc, prefetch, int)
FIELD(ddp_fsdp_desc, no_reshard_after_forward, int)
FIELD(ddp_fsdp_desc, offload, ddp_fsdp_offload)
FIELD(ddp_fsdp_desc, optimizer, ddp_optimizer_desc)
FIELD(ddp_fsdp_desc, buffers, const ddp_tensor *)
FIELD(ddp_fsdp_desc, buffer_names, const char *const *)
FIELD(ddp_fsdp_desc, buffer_count, int)
FIELD(ddp_fsdp_state, per_rank, int64_t)
FIELD(ddp_fsdp_unit_desc, params, ddp_fsdp_param *)
FIELD(ddp_fsdp_param, param, ddp_param)
void check_slices(ddp_fsdp_param *param, int64_t (**shape)[DDP_MAX_NDIM], int64_t (**offset)[DDP_MAX_NDIM]) {
    *shape = &param->global_shape;
    *offset = &param->global_offset;
}

//== ddp_pipeline.h ===========================================================================================

FUNCTION(ddp_schedule_create, ddp_result, (ddp_schedule **, const ddp_schedule_desc *));
FUNCTION(ddp_schedule_parse, ddp_result, (ddp_schedule **, const char *));
FUNCTION(ddp_schedule_write, ddp_result, (const ddp_schedule *, ddp_schedule_format, char *, size_t *));
FUNCTION(ddp_schedule_destroy, void, (ddp_schedule *));
FUNCTION(ddp_schedule_check, ddp_result, (const ddp_schedule *));
FUNCTION(ddp_schedule_simulate, ddp_result,
         (const ddp_schedule *, const ddp_stage_cost *, ddp_schedule_report *));
FUNCTION(ddp_pipeline_partition, ddp_result, (const double *, int, int, int *));
FUNCTION(ddp_pipeline_partition_speed, ddp_result, (const double *, int, const double *, int, int *));
FUNCTION(ddp_pipeline_create, ddp_result, (ddp_pipeline **, ddp_group *, const ddp_pipeline_desc *));
FUNCTION(ddp_pipeline_step, ddp_result, (ddp_pipeline *));
FUNCTION(ddp_pipeline_destroy, void, (ddp_pipeline *));

FIELD(ddp_schedule_desc, kind, ddp_schedule_kind)
FIELD(ddp_schedule_desc, rank_count, int)
FIELD(ddp_schedule_desc, microbatch_count, int)
FIELD(ddp_schedule_desc, chunk_count, int)
FIELD(ddp_schedule_desc, costs, const ddp_stage_cost *)

//== ddp_tensor.h =============================================================================================

FUNCTION(ddp_tensor_create, ddp_result, (ddp_group *, ddp_tensor *, ddp_dtype, int, const int64_t *));
FUNCTION(ddp_tensor_free, void, (ddp_group *, ddp_tensor *));
FUNCTION(ddp_tensor_slice, ddp_result, (const ddp_tensor *, int, int64_t, int64_t, ddp_tensor *));
FUNCTION(ddp_tensor_copy, ddp_result, (ddp_group *, const ddp_tensor *, ddp_tensor *));
FUNCTION(ddp_tensor_redistribute, ddp_result,
         (ddp_group *, const ddp_tensor *, ddp_placement, ddp_placement, ddp_tensor *));
FUNCTION(ddp_tp_linear_create, ddp_result, (ddp_tp_linear **, ddp_tp *, const ddp_tp_linear_desc *));
FUNCTION(ddp_tp_linear_forward, ddp_result,
         (ddp_tp_linear *, const void *, const void *, const void *, int64_t, void *));
FUNCTION(ddp_tp_linear_backward, ddp_result,
         (ddp_tp_linear *, const void *, const void *, const void *, int64_t, void *, void *, void *));
FUNCTION(ddp_tp_embedding_forward, ddp_result,
         (ddp_tp_embedding *, const void *, const int32_t *, int64_t, void *));
FUNCTION(ddp_tp_embedding_backward, ddp_result,
         (ddp_tp_embedding *, const int32_t *, const void *, int64_t, void *));
FUNCTION(ddp_tp_cross_entropy, ddp_result,
         (ddp_tp *, const ddp_tp_loss_desc *, const void *, const int32_t *, int64_t, void *, double *,
          void *));
FUNCTION(ddp_tp_layer_norm_forward, ddp_result,
         (ddp_tp_layer_norm *, const void *, const void *, const void *, int64_t, void *, void *));
FUNCTION(ddp_tp_layer_norm_backward, ddp_result,
         (ddp_tp_layer_norm *, const void *, const void *, const void *, const void *, int64_t, void *,
          void *, void *));

//== ddp_cuda.cuh =============================================================================================

#if defined(__CUDACC__)
FUNCTION(ddp_cuda_group_create, ddp_result, (ddp_group **, ddp_group *, const ddp_cuda_desc *));
FUNCTION(ddp_cuda_set_stream, ddp_result, (ddp_group *, cudaStream_t));
FIELD(ddp_cuda_desc, devices, const int *)
FIELD(ddp_cuda_desc, device_count, int)
FIELD(ddp_cuda_desc, uuid, const char *)
FIELD(ddp_cuda_desc, stream, cudaStream_t)
FIELD(ddp_cuda_desc, comm_stream, cudaStream_t)
FIELD(ddp_cuda_desc, comm, struct ncclComm *)
#endif

//== values ===================================================================================================

static int wrong;
static void expect(int holds, int line, const char *what) {
    if (holds) return;
    fprintf(stderr, "contract.c:%d: %s\n", line, what);
    wrong = 1;
}
#define EXPECT(condition) expect((condition) != 0, __LINE__, #condition)

/* 0 is success, errors are below it, each with its own value and its own name. */
static void check_results(void) {
    const ddp_result all[] = {DDP_OK,           DDP_ERR_INVALID,  DDP_ERR_NO_MEMORY,
                              DDP_ERR_SYSTEM,   DDP_ERR_TIMEOUT,  DDP_ERR_PEER_LOST,
                              DDP_ERR_MISMATCH, DDP_ERR_POISONED, DDP_ERR_UNSUPPORTED,
                              DDP_ERR_CORRUPT,  DDP_ERR_ENGINE};
    EXPECT(DDP_OK == 0 && ddp_last_error()[0] == 0
           && strcmp(ddp_result_name(DDP_ERR_TIMEOUT), "DDP_ERR_TIMEOUT") == 0);
    for (size_t i = 1; i < sizeof all / sizeof *all; i++)
        for (size_t j = 0; j < i; j++)
            EXPECT(all[i] < 0 && all[i] != all[j]
                   && strcmp(ddp_result_name(all[i]), ddp_result_name(all[j])) != 0);
}

static void check_constants(void) { /* the meaning of zero in a field */
    const ddp_dtype dtypes[] = {DDP_DTYPE_DEFAULT, DDP_F32, DDP_F64, DDP_F16, DDP_BF16, DDP_I8, DDP_U8,
                                DDP_I32,           DDP_I64, DDP_U64};
    const ddp_op ops[] = {DDP_OP_SUM, DDP_OP_AVG, DDP_OP_MIN, DDP_OP_MAX, DDP_OP_PROD};
    const ddp_placement dim = DDP_SHARD(1);
    for (int i = 0; i < 10; i++) EXPECT((int)dtypes[i] == i);
    for (int i = 0; i < 5; i++) EXPECT((int)ops[i] == i);
    EXPECT(DDP_MAX_NDIM == 8 && DDP_ORDER_DEFAULT == 0 && DDP_ORDER_TREE != DDP_ORDER_ANY);
    EXPECT(DDP_LAUNCH_PROCESSES == 0 && DDP_LAUNCH_THREADS != 0);
    EXPECT(DDP_SHUFFLE_TORCH == 0 && DDP_SHUFFLE_TORCH_LEGACY != DDP_SHUFFLE_HASHED);
    EXPECT(DDP_FSDP_FULL_SHARD == 0 && DDP_FSDP_SHARD_GRAD != DDP_FSDP_SHARD_OPTIM && DDP_FSDP_NO_SHARD != 0);
    EXPECT(DDP_SCHEDULE_CSV == 0 && DDP_SCHEDULE_TEXT != DDP_SCHEDULE_SVG && DDP_SCHEDULE_TRACE != 0);
    EXPECT(DDP_REPLICATE == 0 && dim != DDP_SHARD(0) && dim != DDP_PARTIAL);
}

int main(void) {
    ddp_launch_desc desc = DDP_ZERO;
    desc.world_size = 2;
    desc.group.timeout_ms = 20000;
    check_results();
    check_constants();
    EXPECT(check_ddp_launch(&desc, check_ddp_rank_fn, NULL) == DDP_OK);
    return wrong;
}
