/*  test_core.c - names, sizes, counts, and the message for every invalid argument.

    All on a group of one rank, where only arguments can be wrong. Each error must name its function, state
    the problem, and leave the group unchanged. */
#include "../support/unit.h"

#include "../../ddp.h"

#include <pthread.h>

//== names and numbers ======================================================================

static void test_result_names(void **state) {
    (void)state;
    assert_string_equal(ddp_result_name(DDP_OK), "DDP_OK");
    assert_string_equal(ddp_result_name(DDP_ERR_TIMEOUT), "DDP_ERR_TIMEOUT");
    assert_string_equal(ddp_result_name(DDP_ERR_ENGINE), "DDP_ERR_ENGINE");
    assert_int_equal(DDP_OK, 0);
#define DDP_X(name, value, text) assert_string_equal(ddp_result_name(name), #name), assert_true((name) <= 0);
    DDP_RESULTS(DDP_X)
#undef DDP_X
    assert_non_null(ddp_result_name((ddp_result)1));
    assert_non_null(ddp_result_name((ddp_result)-99));
}

static void test_dtypes(void **state) {
    static const struct {
        ddp_dtype dtype;
        size_t size;
        const char *name;
    } table[] = {
        {DDP_F32, 4, "f32"},   {DDP_F64, 8, "f64"}, {DDP_F16, 2, "f16"},
        {DDP_BF16, 2, "bf16"}, {DDP_I8, 1, "i8"},   {DDP_U8, 1, "u8"},
        {DDP_I32, 4, "i32"},   {DDP_I64, 8, "i64"}, {DDP_U64, 8, "u64"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        assert_int_equal(ddp_dtype_size(table[i].dtype), table[i].size);
        assert_string_equal(ddp_dtype_name(table[i].dtype), table[i].name);
    }
    assert_int_equal(ddp_dtype_size(DDP_DTYPE_DEFAULT), 0);
    assert_int_equal(ddp_dtype_size((ddp_dtype)(DDP_U64 + 1)), 0);
    assert_int_equal(ddp_dtype_size((ddp_dtype)-1), 0);
    assert_non_null(ddp_dtype_name(DDP_DTYPE_DEFAULT));
    assert_non_null(ddp_dtype_name((ddp_dtype)1000));
}

static void test_tensor_count(void **state) {
    ddp_tensor t = DDP_ZERO;
    (void)state;
    assert_int_equal(ddp_tensor_count(&t), 1);
    t.ndim = 3, t.shape[0] = 4, t.shape[1] = 5, t.shape[2] = 6;
    assert_int_equal(ddp_tensor_count(&t), 120);
    t.shape[1] = 0;
    assert_int_equal(ddp_tensor_count(&t), 0);
    t.shape[1] = -1;
    assert_int_equal(ddp_tensor_count(&t), -1);
    t.shape[1] = INT64_MAX / 24;
    assert_int_equal(ddp_tensor_count(&t), INT64_MAX / 24 * 24);
    t.shape[1] = INT64_MAX / 24 + 1;
    assert_int_equal(ddp_tensor_count(&t), -1);
    t.shape[0] = 0, t.shape[1] = -1; /* a negative entry is an error even next to a zero */
    assert_int_equal(ddp_tensor_count(&t), -1);
    t.ndim = -1;
    assert_int_equal(ddp_tensor_count(&t), -1);
    t.ndim = DDP_MAX_NDIM;
    for (int i = 0; i < DDP_MAX_NDIM; i++) t.shape[i] = 2;
    assert_int_equal(ddp_tensor_count(&t), 256);
    for (int i = 0; i < DDP_MAX_NDIM; i++) t.shape[i] = 256; /* 2^64 */
    assert_int_equal(ddp_tensor_count(&t), -1);
    t.ndim = DDP_MAX_NDIM + 1;
    assert_int_equal(ddp_tensor_count(&t), -1);
}

static void *fresh_thread(void *out) {
    *(int *)out = ddp_last_error()[0] == 0;
    ddp_fail(DDP_ERR_CORRUPT, "text of %s thread", "another");
    return NULL;
}

/* Of a gradient a user sets dtype, shape and memory, all or none of them. */
static void test_param_grad(void **state) {
    (void)state;
    float value[6], grad[6];
    ddp_param param = DDP_ZERO;
    ddp_tensor got;
    param.value.data = value;
    param.value.dtype = DDP_BF16;
    param.value.ndim = 1;
    param.value.shape[0] = 6;
    got = ddp_param_grad(&param);
    assert_null(got.data);
    assert_int_equal(got.dtype, DDP_BF16);
    assert_int_equal(ddp_tensor_count(&got), 6);
    param.grad.data = grad;
    param.grad.dtype = DDP_F32;
    got = ddp_param_grad(&param);
    assert_ptr_equal(got.data, grad);
    assert_int_equal(got.dtype, DDP_F32);
    assert_int_equal(ddp_tensor_count(&got), 6);
}

static void test_last_error_is_per_thread(void **state) {
    pthread_t thread;
    int was_empty = 0;
    char longest[5000];
    (void)state;
    assert_int_equal(ddp_fail(DDP_ERR_TIMEOUT, "mine %d", 7), DDP_ERR_TIMEOUT);
    assert_int_equal(pthread_create(&thread, NULL, fresh_thread, &was_empty), 0);
    pthread_join(thread, NULL);
    assert_true(was_empty);
    assert_string_equal(ddp_last_error(), "mine 7");
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    ddp_fail(DDP_ERR_TIMEOUT, "%s", longest); /* is cut, not overrun */
    assert_true(strlen(ddp_last_error()) > 100);
    assert_null(strchr(ddp_last_error(), '\n'));
    ddp_fail(DDP_ERR_TIMEOUT, "again: %s", ddp_last_error()); /* its own text as an argument */
    assert_memory_equal(ddp_last_error(), "again: xxx", 10);
}

static void test_clock(void **state) {
    double before = ddp_now(), after;
    (void)state;
    for (volatile int i = 0; i < 100000; i++) {
    }
    after = ddp_now();
    assert_true(after > before && after - before < 10);
}

//== a group of one =========================================================================

static void clear_environment(void) {
    static const char *const names[] = {"RANK",
                                        "WORLD_SIZE",
                                        "LOCAL_RANK",
                                        "LOCAL_WORLD_SIZE",
                                        "MASTER_ADDR",
                                        "MASTER_PORT",
                                        "OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "OMPI_COMM_WORLD_LOCAL_SIZE",
                                        "PMI_RANK",
                                        "PMI_SIZE",
                                        "MPI_LOCALRANKID",
                                        "MPI_LOCALNRANKS",
                                        "SLURM_PROCID",
                                        "SLURM_NTASKS",
                                        "SLURM_LOCALID",
                                        "SLURM_STEP_ID",
                                        "SLURM_JOB_NODELIST"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unsetenv(names[i]);
}

static int make_self(void **state) {
    ddp_group_desc desc = DDP_ZERO;
    desc.init_method = "self://";
    return ddp_group_create((ddp_group **)state, &desc) == DDP_OK ? 0 : -1;
}

static int drop_self(void **state) {
    ddp_group_destroy((ddp_group *)*state);
    return 0;
}

static void test_world_of_one(void **state) {
    ddp_group *group = NULL;
    float in[3] = {1, 2, 3}, out[3] = {0, 0, 0};
    size_t three = 3;
    void *memory = NULL;
    (void)state;
    clear_environment();
    assert_int_equal(ddp_group_create(&group, NULL), DDP_OK); /* no rank variables: one rank */
    assert_int_equal(ddp_world_size(group), 1);
    assert_int_equal(ddp_rank(group), 0);
    assert_int_equal(ddp_local_rank(group), 0);
    assert_int_equal(ddp_local_world_size(group), 1);
    assert_int_equal(ddp_group_timeout_ms(group), 600000);
    assert_ptr_equal(ddp_group_device(group), ddp_device_cpu());
    assert_int_equal(ddp_all_to_all_v(group, in, &three, NULL, out, &three, NULL, DDP_F32, NULL), DDP_OK);
    assert_memory_equal(in, out, sizeof in);
    assert_int_equal(ddp_group_alloc(group, 100, &memory), DDP_OK);
    assert_int_equal((uintptr_t)memory % 64, 0);
    for (int i = 0; i < 100; i++) assert_int_equal(((char *)memory)[i], 0);
    assert_ptr_equal(ddp_group_peer(group, memory, 0), memory);
    ddp_group_destroy(group); /* frees memory too */
    ddp_group_destroy(NULL);
}

static int live_blocks;
static void *counting_alloc(size_t size_bytes, void *user) {
    ++*(int *)user;
    return malloc(size_bytes);
}
static void counting_free(void *memory, void *user) {
    --*(int *)user;
    free(memory);
}
static void *refusing_alloc(size_t size_bytes, void *user) {
    (void)size_bytes;
    return --*(int *)user < 0 ? NULL : malloc(size_bytes);
}
static void plain_free(void *memory, void *user) {
    (void)user;
    free(memory);
}

static void test_allocator_of_the_caller(void **state) {
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *group = NULL, *child = NULL;
    void *memory;
    (void)state;
    desc.init_method = "self://";
    desc.alloc_fn = counting_alloc, desc.free_fn = counting_free, desc.user = &live_blocks;
    assert_int_equal(ddp_group_create(&group, &desc), DDP_OK);
    assert_true(live_blocks > 0);
    memory = ddp_host_alloc(group, 1000);
    assert_non_null(memory);
    assert_int_equal((uintptr_t)memory % 64, 0);
    ddp_host_free(group, memory);
    ddp_host_free(group, NULL);
    assert_int_equal(ddp_group_split(group, 0, 0, &child), DDP_OK);
    ddp_group_destroy(child);
    ddp_group_destroy(group);
    assert_int_equal(live_blocks, 0);
    /* Every allocation fails once; create must fail cleanly. */
    for (int allowed = 0; allowed < 50; allowed++) {
        int left = allowed;
        ddp_result result;
        desc.alloc_fn = refusing_alloc, desc.free_fn = plain_free, desc.user = &left;
        group = (ddp_group *)&left;
        result = ddp_group_create(&group, &desc);
        if (result == DDP_OK) {
            ddp_group_destroy(group);
            break;
        }
        assert_int_equal(result, DDP_ERR_NO_MEMORY);
        assert_null(group);
        assert_true(ddp_last_error()[0] != 0);
    }
    /* The same holds for a split. */
    for (int allowed = 0; allowed < 50; allowed++) {
        int left = 1000;
        ddp_result result;
        desc.alloc_fn = refusing_alloc;
        desc.free_fn = plain_free;
        desc.user = &left;
        assert_int_equal(ddp_group_create(&group, &desc), DDP_OK);
        left = allowed;
        child = group;
        result = ddp_group_split(group, 0, 0, &child);
        if (result != DDP_OK) {
            assert_int_equal(result, DDP_ERR_NO_MEMORY);
            assert_null(child);
        } else {
            assert_non_null(child);
        }
        ddp_group_destroy(child);
        ddp_group_destroy(group);
        if (result == DDP_OK) break;
    }
}

//== lines of text ==========================================================================

static char noticed[200];
static void note(const char *text, void *user) {
    (void)user;
    snprintf(noticed, sizeof noticed, "%s", text);
}

/* Error lines name rank, call, group, number and size; a barrier has no size. */
static void test_lines(void **state) {
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *group;
    float data[5] = {0};
    char want[200];
    (void)state;
    desc.init_method = "self://";
    assert_int_equal(ddp_group_create(&group, &desc), DDP_OK);
    ddp_group_log(group, "nobody reads this");
    ddp_group_abort(group);
    assert_true(ddp_all_reduce(group, data, data, 5, DDP_F32, DDP_OP_SUM, NULL) != DDP_OK);
    snprintf(want, sizeof want,
             "rank 0/1 ddp_all_reduce group=%s seq=1 f32 count=5: ", ddp_group_name(group));
    assert_memory_equal(ddp_last_error(), want, strlen(want));
    assert_true(ddp_barrier(group) != DDP_OK);
    snprintf(want, sizeof want, "rank 0/1 ddp_barrier group=%s seq=2: ", ddp_group_name(group));
    assert_memory_equal(ddp_last_error(), want, strlen(want));
    ddp_group_destroy(group);
    desc.log_fn = note;
    assert_int_equal(ddp_group_create(&group, &desc), DDP_OK);
    ddp_group_log(group, "something is slow");
    snprintf(want, sizeof want, "rank 0/1 group=%s: something is slow", ddp_group_name(group));
    assert_string_equal(noticed, want);
    ddp_group_destroy(group);
}

//== wrong arguments ========================================================================

/* The call returns DDP_ERR_INVALID, its line names the function and contains a word, and the group stays
   usable. */
#define REFUSED(call, function, word)                                                      \
    do {                                                                                   \
        ddp_result refused = (call);                                                       \
        if (refused != DDP_ERR_INVALID)                                                    \
            fail_msg("%s gave %s: %s", #call, ddp_result_name(refused), ddp_last_error()); \
        if (!strstr(ddp_last_error(), function))                                           \
            fail_msg("%s: '%s' does not name %s", #call, ddp_last_error(), function);      \
        if (!strstr(ddp_last_error(), word))                                               \
            fail_msg("%s: '%s' does not contain '%s'", #call, ddp_last_error(), word);     \
        if (strchr(ddp_last_error(), '\n')) fail_msg("%s: more than one line", #call);     \
    } while (0)

static void still_fine(ddp_group *g) {
    int64_t one = 1, sum = 0;
    assert_int_equal(ddp_group_status(g), DDP_OK);
    assert_int_equal(ddp_all_reduce(g, &one, &sum, 1, DDP_I64, DDP_OP_SUM, NULL), DDP_OK);
    assert_int_equal(sum, 1);
}

static void test_collective_arguments(void **state) {
    ddp_group *g = (ddp_group *)*state;
    float a[8] = {0}, b[8] = {0};
    size_t n[1] = {2}, one[1] = {1}, off[1] = {0}, huge[1] = {SIZE_MAX / 2}, far[1] = {SIZE_MAX - 1};
    const ddp_dtype bad_dtype = (ddp_dtype)99;
    const ddp_op bad_op = (ddp_op)99;

    REFUSED(ddp_all_reduce(NULL, a, b, 2, DDP_F32, DDP_OP_SUM, NULL), "ddp_all_reduce", "group");
    REFUSED(ddp_all_reduce(g, NULL, b, 2, DDP_F32, DDP_OP_SUM, NULL), "ddp_all_reduce", "send");
    REFUSED(ddp_all_reduce(g, a, NULL, 2, DDP_F32, DDP_OP_SUM, NULL), "ddp_all_reduce", "recv");
    REFUSED(ddp_all_reduce(g, a, b, 2, bad_dtype, DDP_OP_SUM, NULL), "ddp_all_reduce", "dtype");
    REFUSED(ddp_all_reduce(g, a, b, 2, DDP_DTYPE_DEFAULT, DDP_OP_SUM, NULL), "ddp_all_reduce", "dtype");
    REFUSED(ddp_all_reduce(g, a, b, 2, (ddp_dtype)-1, DDP_OP_SUM, NULL), "ddp_all_reduce", "dtype");
    REFUSED(ddp_all_reduce(g, a, b, 2, DDP_F32, bad_op, NULL), "ddp_all_reduce", "op");
    REFUSED(ddp_all_reduce(g, a, b, 2, DDP_F32, (ddp_op)-1, NULL), "ddp_all_reduce", "op");
    REFUSED(ddp_all_reduce(g, a, a + 1, 4, DDP_F32, DDP_OP_SUM, NULL), "ddp_all_reduce", "overlap");
    REFUSED(ddp_all_reduce(g, a + 1, a, 4, DDP_F32, DDP_OP_SUM, NULL), "ddp_all_reduce", "overlap");
    REFUSED(ddp_all_reduce(g, a, b, SIZE_MAX / 2, DDP_F32, DDP_OP_SUM, NULL), "ddp_all_reduce", "count");
    REFUSED(ddp_all_reduce(g, a, b, SIZE_MAX, DDP_U8, DDP_OP_SUM, NULL), "ddp_all_reduce", "count");

    REFUSED(ddp_reduce(g, a, b, 2, DDP_F32, DDP_OP_SUM, 1, NULL), "ddp_reduce", "root");
    REFUSED(ddp_reduce(g, a, b, 2, DDP_F32, DDP_OP_SUM, -1, NULL), "ddp_reduce", "root");
    REFUSED(ddp_reduce(g, a, NULL, 2, DDP_F32, DDP_OP_SUM, 0, NULL), "ddp_reduce", "recv");
    REFUSED(ddp_reduce(g, a, b, 2, DDP_F32, bad_op, 0, NULL), "ddp_reduce", "op");
    REFUSED(ddp_broadcast(NULL, a, 2, DDP_F32, 0, NULL), "ddp_broadcast", "group");
    REFUSED(ddp_broadcast(g, NULL, 2, DDP_F32, 0, NULL), "ddp_broadcast", "NULL");
    REFUSED(ddp_broadcast(g, a, 2, DDP_F32, 7, NULL), "ddp_broadcast", "root");
    REFUSED(ddp_broadcast(g, a, 2, bad_dtype, 0, NULL), "ddp_broadcast", "dtype");
    REFUSED(ddp_all_gather(g, NULL, b, 2, DDP_F32, NULL), "ddp_all_gather", "send");
    REFUSED(ddp_all_gather(g, a, NULL, 2, DDP_F32, NULL), "ddp_all_gather", "recv");
    REFUSED(ddp_all_gather(g, a + 1, a, 2, DDP_F32, NULL), "ddp_all_gather", "overlap");
    REFUSED(ddp_all_gather(g, a, b, 2, bad_dtype, NULL), "ddp_all_gather", "dtype");
    REFUSED(ddp_reduce_scatter(g, a, NULL, 2, DDP_F32, DDP_OP_SUM, NULL), "ddp_reduce_scatter", "recv");
    REFUSED(ddp_reduce_scatter(g, a, a + 1, 2, DDP_F32, DDP_OP_SUM, NULL), "ddp_reduce_scatter", "overlap");
    REFUSED(ddp_reduce_scatter(g, a, b, 2, DDP_F32, bad_op, NULL), "ddp_reduce_scatter", "op");
    REFUSED(ddp_all_to_all(g, a, a, 2, DDP_F32, NULL), "ddp_all_to_all", "overlap");
    REFUSED(ddp_all_to_all(g, NULL, b, 2, DDP_F32, NULL), "ddp_all_to_all", "send");
    REFUSED(ddp_gather(g, a, b, 2, DDP_F32, -3, NULL), "ddp_gather", "root");
    REFUSED(ddp_gather(g, a, NULL, 2, DDP_F32, 0, NULL), "ddp_gather", "recv");
    REFUSED(ddp_scatter(g, NULL, b, 2, DDP_F32, 0, NULL), "ddp_scatter", "send");
    REFUSED(ddp_scatter(g, a, b, 2, DDP_F32, 1, NULL), "ddp_scatter", "root");

    REFUSED(ddp_all_gather_v(g, a, 2, b, NULL, NULL, DDP_F32, NULL), "ddp_all_gather_v", "recv_counts");
    REFUSED(ddp_all_gather_v(g, a, 3, b, n, NULL, DDP_F32, NULL), "ddp_all_gather_v", "send_count");
    REFUSED(ddp_all_gather_v(g, a, 2, NULL, n, off, DDP_F32, NULL), "ddp_all_gather_v", "recv");
    REFUSED(ddp_all_gather_v(g, a, SIZE_MAX / 2, b, huge, NULL, DDP_F32, NULL), "ddp_all_gather_v", "count");
    REFUSED(ddp_all_gather_v(g, a, 2, b, n, far, DDP_F32, NULL), "ddp_all_gather_v", "not fit in memory");
    REFUSED(ddp_all_to_all_v(g, a, NULL, NULL, b, n, NULL, DDP_F32, NULL), "ddp_all_to_all_v", "send_counts");
    REFUSED(ddp_all_to_all_v(g, a, n, NULL, b, NULL, NULL, DDP_F32, NULL), "ddp_all_to_all_v", "recv_counts");
    REFUSED(ddp_all_to_all_v(g, a, n, off, a, n, off, DDP_F32, NULL), "ddp_all_to_all_v", "overlap");
    REFUSED(ddp_all_to_all_v(g, NULL, n, NULL, b, n, NULL, DDP_F32, NULL), "ddp_all_to_all_v", "send");
    REFUSED(ddp_all_to_all_v(g, a, n, NULL, b, one, NULL, DDP_F32, NULL), "ddp_all_to_all_v",
            "send_counts[0]=2, but recv_counts[0]=1");
    REFUSED(ddp_barrier(NULL), "ddp_barrier", "group");
    still_fine(g);
}

/* If nothing is sent, NULL is a valid buffer; if nothing has to be done, all arguments are valid. */
static void test_nothing_to_send(void **state) {
    ddp_group *g = (ddp_group *)*state;
    size_t none[1] = {0};
    assert_int_equal(ddp_all_reduce(g, NULL, NULL, 0, DDP_F32, DDP_OP_SUM, NULL), DDP_OK);
    assert_int_equal(ddp_broadcast(g, NULL, 0, DDP_F32, 0, NULL), DDP_OK);
    assert_int_equal(ddp_all_gather(g, NULL, NULL, 0, DDP_F32, NULL), DDP_OK);
    assert_int_equal(ddp_reduce_scatter(g, NULL, NULL, 0, DDP_F32, DDP_OP_MIN, NULL), DDP_OK);
    assert_int_equal(ddp_all_to_all(g, NULL, NULL, 0, DDP_F32, NULL), DDP_OK);
    assert_int_equal(ddp_gather(g, NULL, NULL, 0, DDP_F32, 0, NULL), DDP_OK);
    assert_int_equal(ddp_scatter(g, NULL, NULL, 0, DDP_F32, 0, NULL), DDP_OK);
    assert_int_equal(ddp_all_gather_v(g, NULL, 0, NULL, none, NULL, DDP_F32, NULL), DDP_OK);
    assert_int_equal(ddp_all_to_all_v(g, NULL, none, NULL, NULL, none, NULL, DDP_F32, NULL), DDP_OK);
    assert_int_equal(ddp_barrier(g), DDP_OK);
    still_fine(g);
}

static void test_other_arguments(void **state) {
    ddp_group *g = (ddp_group *)*state, *out = g;
    float a[2] = {0};
    ddp_work none = DDP_ZERO;
    int done = 0;
    void *memory = a;

    REFUSED(ddp_send(NULL, a, 1, DDP_F32, 0, 0, NULL), "ddp_send", "group");
    REFUSED(ddp_send(g, a, 1, DDP_F32, 0, 0, NULL), "ddp_send", "peer");
    REFUSED(ddp_send(g, a, 1, DDP_F32, 5, 0, NULL), "ddp_send", "peer");
    REFUSED(ddp_recv(g, a, 1, DDP_F32, -1, 0, NULL), "ddp_recv", "peer");
    REFUSED(ddp_recv(NULL, a, 1, DDP_F32, 0, 0, NULL), "ddp_recv", "group");
    REFUSED(ddp_p2p_begin(NULL), "ddp_p2p_begin", "group");
    REFUSED(ddp_p2p_end(NULL), "ddp_p2p_end", "group");
    REFUSED(ddp_p2p_end(g), "ddp_p2p_end", "no batch is open");
    assert_int_equal(ddp_p2p_begin(g), DDP_OK);
    REFUSED(ddp_p2p_begin(g), "ddp_p2p_begin", "already open");
    assert_int_equal(ddp_p2p_end(g), DDP_OK);

    REFUSED(ddp_wait(NULL, &none), "ddp_wait", "group");
    REFUSED(ddp_wait(g, NULL), "ddp_wait", "work");
    REFUSED(ddp_test(g, &none, NULL), "ddp_test", "done");
    REFUSED(ddp_test(g, NULL, &done), "ddp_test", "work");
    REFUSED(ddp_group_enqueue(g, NULL, NULL, &none), "ddp_group_enqueue", "fn");

    REFUSED(ddp_group_split(g, 0, 0, NULL), "ddp_group_split", "out");
    REFUSED(ddp_group_split(NULL, 0, 0, &out), "ddp_group_split", "group");
    REFUSED(ddp_group_alloc(g, 0, &memory), "ddp_group_alloc", "size_bytes");
    assert_null(memory);
    REFUSED(ddp_group_alloc(g, 64, NULL), "ddp_group_alloc", "out");
    REFUSED(ddp_group_alloc(NULL, 64, &memory), "ddp_group_alloc", "group");
    REFUSED(ddp_group_free(NULL, a), "ddp_group_free", "group");
    REFUSED(ddp_group_free(g, a), "ddp_group_free", "ddp_group_alloc");
    REFUSED(ddp_group_status(NULL), "ddp_group_status", "group");
    REFUSED(ddp_group_abort(NULL), "ddp_group_abort", "group");
    still_fine(g);
}

/* What a backend learns about a call. Only the two ranks of a message move bytes. A mismatch names the lower
   rank first, in whatever order a backend passes the ranks. */
static void test_calls_of_backends(void **state) {
    static const char both[] =
        "rank 1 ddp_all_reduce f32 count=10 sum, rank 4 ddp_all_reduce f32 count=11 sum";
    ddp_call call = DDP_ZERO;
    uint64_t ten[2], eleven[2];
    (void)state;
    call.kind = DDP_CALL_ALL_REDUCE;
    call.dtype = DDP_F32;
    call.root = -1;
    call.count = 10;
    ddp_call_pack(&call, ten);
    call.count = 11;
    ddp_call_pack(&call, eleven);
    assert_int_equal(ddp_call_compare(1, ten, 4, ten), DDP_OK);
    assert_int_equal(ddp_call_compare(1, ten, 4, eleven), DDP_ERR_MISMATCH);
    assert_non_null(strstr(ddp_last_error(), both));
    assert_int_equal(ddp_call_compare(4, eleven, 1, ten), DDP_ERR_MISMATCH);
    assert_non_null(strstr(ddp_last_error(), both));

    call.root = 2; /* the peer */
    for (int is_send = 0; is_send < 2; is_send++) {
        call.kind = is_send ? DDP_CALL_SEND : DDP_CALL_RECV;
        for (int peer = 0; peer < 4; peer++) {
            size_t size = peer == 2 ? 11 * sizeof(float) : 0;
            assert_int_equal(ddp_call_sends(&call, 0, peer).size, is_send ? size : 0);
            assert_int_equal(ddp_call_receives(&call, 0, peer).size, is_send ? 0 : size);
        }
    }
    call.kind = DDP_CALL_BARRIER;
    call.count = 0;
    call.root = -1;
    assert_int_equal(ddp_call_sends(&call, 0, 1).size, 0);
    assert_int_equal(ddp_call_receives(&call, 0, 1).size, 0);
}

static void test_group_desc(void **state) {
    static const char *const methods[] = {"self:/", "", "SELF://", "nonsense", "self://x"};
    ddp_group_desc desc = DDP_ZERO;
    ddp_group *group = NULL;
    (void)state;
    clear_environment();
    REFUSED(ddp_group_create(NULL, NULL), "ddp_group_create", "out");
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
        desc.init_method = methods[i];
        group = (ddp_group *)&desc;
        REFUSED(ddp_group_create(&group, &desc), "ddp_group_create", "init_method");
        assert_null(group);
    }
    desc.init_method = "self://";
    desc.timeout_ms = -1;
    REFUSED(ddp_group_create(&group, &desc), "ddp_group_create", "timeout_ms");
    desc.timeout_ms = 0;
    desc.alloc_fn = counting_alloc;
    REFUSED(ddp_group_create(&group, &desc), "ddp_group_create", "free_fn");
    desc.alloc_fn = NULL, desc.free_fn = counting_free;
    REFUSED(ddp_group_create(&group, &desc), "ddp_group_create", "alloc_fn");
    desc.free_fn = NULL;
    desc.order = (ddp_order)9;
    REFUSED(ddp_group_create(&group, &desc), "ddp_group_create", "order");
    desc.order = DDP_ORDER_TREE;
    desc.world_size = -2;
    REFUSED(ddp_group_create(&group, &desc), "ddp_group_create", "world_size");
    desc.world_size = 2, desc.rank = 2;
    desc.init_method = NULL;
    REFUSED(ddp_group_create(&group, &desc), "ddp_group_create", "rank");
    desc.rank = -1;
    REFUSED(ddp_group_create(&group, &desc), "ddp_group_create", "rank");
    desc.rank = 1, desc.init_method = "self://"; /* a world of one has no rank 1 */
    REFUSED(ddp_group_create(&group, &desc), "ddp_group_create", "self://");
    /* A name longer than the limit is truncated, and appears in errors. */
    memset(&desc, 0, sizeof desc);
    desc.init_method = "self://";
    desc.name = "a-name-of-31-bytes-is-all-kept!and-this-is-not";
    assert_int_equal(ddp_group_create(&group, &desc), DDP_OK);
    assert_int_equal(ddp_group_abort(group), DDP_OK);
    assert_int_not_equal(ddp_group_status(group), DDP_OK);
    assert_int_not_equal(ddp_barrier(group), DDP_OK);
    assert_non_null(strstr(ddp_last_error(), "a-name-of-31-bytes-is-all-kept!"));
    assert_null(strstr(ddp_last_error(), "and-this"));
    ddp_group_destroy(group);
}

/* The variables of a launcher contradict each other. */
static void test_launcher_variables(void **state) {
    static const struct {
        const char *rank, *local_rank, *text;
    } cases[] = {
        {"1", "0", "RANK=1 with WORLD_SIZE=1; use ranks 0 to 0"},
        {"0", "1", "LOCAL_RANK=1 and LOCAL_WORLD_SIZE=1 contradict WORLD_SIZE=1"},
    };
    ddp_group *group = NULL;
    (void)state;
    clear_environment();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        setenv("RANK", cases[i].rank, 1);
        setenv("WORLD_SIZE", "1", 1);
        setenv("LOCAL_RANK", cases[i].local_rank, 1);
        setenv("LOCAL_WORLD_SIZE", "1", 1);
        REFUSED(ddp_group_create(&group, NULL), "ddp_group_create", cases[i].text);
        assert_null(group);
    }
    clear_environment();
}

static ddp_result nothing(ddp_group *world, void *user) {
    (void)world;
    ++*(int *)user;
    return DDP_OK;
}
static ddp_result fails(ddp_group *world, void *user) {
    (void)world, (void)user;
    return ddp_fail(DDP_ERR_CORRUPT, "the one rank failed");
}

static void test_launch_desc(void **state) {
    ddp_launch_desc desc = DDP_ZERO;
    int ran = 0;
    (void)state;
    clear_environment();
    desc.world_size = 1;
    REFUSED(ddp_launch(&desc, NULL, NULL), "ddp_launch", "fn");
    desc.world_size = -1;
    REFUSED(ddp_launch(&desc, nothing, &ran), "ddp_launch", "world_size");
    desc.world_size = DDP_MAX_LOCAL_RANKS + 1;
    REFUSED(ddp_launch(&desc, nothing, &ran), "ddp_launch", "world_size");
    desc.world_size = 1, desc.mode = (ddp_launch_mode)5;
    REFUSED(ddp_launch(&desc, nothing, &ran), "ddp_launch", "mode");
    desc.mode = DDP_LAUNCH_PROCESSES, desc.max_restarts = -1;
    REFUSED(ddp_launch(&desc, nothing, &ran), "ddp_launch", "max_restarts");
    desc.max_restarts = 0, desc.group.timeout_ms = -5;
    REFUSED(ddp_launch(&desc, nothing, &ran), "ddp_launch", "timeout_ms");
    desc.group.timeout_ms = 0, desc.group.alloc_fn = counting_alloc;
    REFUSED(ddp_launch(&desc, nothing, &ran), "ddp_launch", "free_fn");
    desc.group.alloc_fn = NULL;
    assert_int_equal(ran, 0);
    /* The one rank runs on the caller, so ran is the caller's variable. */
    assert_int_equal(ddp_launch(&desc, nothing, &ran), DDP_OK);
    assert_int_equal(ran, 1);
    assert_int_equal(ddp_launch(&desc, fails, NULL), DDP_ERR_CORRUPT);
    assert_non_null(strstr(ddp_last_error(), "the one rank failed"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_result_names),
        cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_tensor_count),
        cmocka_unit_test(test_param_grad),
        cmocka_unit_test(test_last_error_is_per_thread),
        cmocka_unit_test(test_clock),
        cmocka_unit_test(test_world_of_one),
        cmocka_unit_test(test_allocator_of_the_caller),
        cmocka_unit_test(test_lines),
        cmocka_unit_test_setup_teardown(test_collective_arguments, make_self, drop_self),
        cmocka_unit_test_setup_teardown(test_nothing_to_send, make_self, drop_self),
        cmocka_unit_test_setup_teardown(test_other_arguments, make_self, drop_self),
        cmocka_unit_test(test_calls_of_backends),
        cmocka_unit_test(test_group_desc),
        cmocka_unit_test(test_launcher_variables),
        cmocka_unit_test(test_launch_desc),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
