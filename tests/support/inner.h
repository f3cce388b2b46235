/*  inner.h - the private parts of ddp.h that tests change and call. implementation.c has them, in one object
    per flavour: compiling DDP_IMPLEMENTATION takes ten times as long as the rest of a test.

    Include after ddp.h. */
#ifndef DDP_TEST_INNER_H
#define DDP_TEST_INNER_H

#if defined(__cplusplus)
extern "C" {
#endif

enum { INNER_HELLO = 1, INNER_NEWS, INNER_DATA, INNER_CHALLENGE, INNER_PROOF }; /* kinds of frames */
enum { INNER_TEXT = 512 }; /* bytes of text after each head except that of data */

struct ddp_update;
struct ddp_update_tensor;

typedef struct test_inner {
    /* private parameters of ddp.h; their initial values are the normal ones */
    size_t large_bytes, runs_bytes; /* DDP__LARGE_BYTES, DDP__MIN_RUN_BYTES */
    /* Small values, so that calls small enough for a test need several pieces over MPI. */
    size_t mpi_chunk_bytes, mpi_piece_bytes;
    int64_t inside_out_from; /* DDP__RANDPERM_INSIDE_OUT_FROM */
    int narrow;              /* the CPU has no wide vectors */
    int (*is_amd)(void);     /* replaces the detection of the CPU; NULL = the real one */
    /* The system lacks memfd_create, process_vm_readv and MADV_POPULATE_WRITE. */
    int refuses;
    int no_room; /* posix_fallocate finds no room */
    int wakes;   /* how many times this process called FUTEX_WAKE */
    /* Called when rank 0 has read the hello of this rank, which joins by its environment. */
    void (*hello_is_read)(void);
    void (*before_hello)(void);  /* called before this rank sends a hello */
    void (*before_listen)(void); /* called before this rank listens */
    int p2p_slice_ms;            /* DDP__P2P_SLICE_MS */
    /* Number of methods for large private data, and the one that reads the peers' buffers in one copy. */
    int ways, way_read;

    /* private functions */
    void (*reduce_tree)(void *const *dst, int dst_count, const void *const *src, int src_count, size_t count,
                        ddp_dtype dtype, ddp_op op, uint64_t divisor, int how);
    void (*cast)(void *dst, ddp_dtype dst_dtype, const void *src, ddp_dtype src_dtype, size_t count);
    void (*divide)(void *data, size_t count, ddp_dtype dtype, uint64_t divisor);
    void (*update_f32)(const struct ddp_update *u, const struct ddp_update_tensor *t);
    void (*update_f64)(const struct ddp_update *u, const struct ddp_update_tensor *t);
    void (*copy_across)(void *dst, const void *src, size_t size_bytes);
    void (*copy_stream)(void *dst, const void *src, size_t size_bytes);
    void (*stream_end)(void);
    void (*exact_add_squares)(ddp_exact_sum *sum, const void *data, size_t rows, size_t row_count,
                              ddp_dtype dtype);
    int (*tcp_listen)(const char *host, int port);
    void (*first_host)(char *out, size_t size_bytes, const char *list);
    uint32_t version; /* version of ddp.h in hellos */
    /* Writes the hello of a rank; returns its size. */
    size_t (*hello)(void *out, const char *token, int rank, int world_size, uint32_t version);
    /* Writes the head of a frame of kind INNER_...; returns its size. size: bytes that follow. call: of data,
       or NULL. */
    size_t (*frame)(void *out, uint32_t kind, int32_t result, uint64_t size, const ddp_call *call);
    /* Name of the abstract socket of the job in the environment. */
    ddp_result (*job_socket)(char *name, size_t size_bytes);
    const char *(*backend_name)(const ddp_group *group);
    void (*forget_cause)(ddp_group *group);  /* of its failure */
    int (*handles_in_use)(ddp_group *group); /* of asynchronous calls before their ddp_wait */

    /* of a group of the local backend */
    void (*exhaust)(ddp_group *group); /* its shared memory is used up */
    /* The cause of a failure; DDP_OK: a cause that is about to be written. */
    void (*write_cause)(ddp_group *group, ddp_result code, const char *text);
    /* The method that rank 0 proposes next, for any kind and size. */
    void (*force_way)(ddp_group *group, int way);
    uint64_t (*round)(const ddp_group *group); /* number of its collectives up to now */
    int (*can_read_peers)(ddp_group *group);
    /* 1 = its process can be read, -1 = refused, 0 = not known yet */
    int *(*can_read)(ddp_group *group, int peer);
    /* The process id of a rank, as stored by the ranks of the world. */
    int32_t *(*pid)(ddp_group *group, int rank);
} test_inner;

extern test_inner inner;
struct ddp_pipeline;
/* Seconds from the first to the last action of a rank in the last step. */
double inner_span(const struct ddp_pipeline *pipeline, int rank);
extern __thread int machine_salt; /* ranks with different ones do not share a machine */

#if defined(__cplusplus)
}
#endif

#endif /* DDP_TEST_INNER_H */
