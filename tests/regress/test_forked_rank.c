/*  test_forked_rank.c - a process forked by a rank gets an error from every call, and has no effect on other
    ranks.

    Once, its calls counted as the rank's: a barrier of the child released the peers, and its
    ddp_group_destroy reported that the rank had left. Later, a layer that failed in the child failed the
    group: ddp_fsdp_destroy with gradients in flight, or ddp_pipeline_step. A loader's calls waited for its
    workers, which the child does not have: ddp_loader_destroy waited for the whole timeout, or forever. */
#include "../../ddp_fsdp.h"
#include "../support/inner.h"
#include "../support/ranks.h"
#include <sys/wait.h>

static int failures;
#define REFUSED(call)                                                                 \
    do {                                                                              \
        ddp_result refused = (call);                                                  \
        const char *line = ddp_last_error();                                          \
        if (refused == DDP_ERR_INVALID                                                \
            && strstr(line, "was forked from the rank and is not part of the group")) \
            break;                                                                    \
        fprintf(stderr, "FAIL %s: %s: %s\n", #call, ddp_result_name(refused), line);  \
        failures++;                                                                   \
    } while (0)

typedef struct things {
    ddp_fsdp *fsdp;
    ddp_loader *loader;
    uint64_t *word; /* group memory */
} things;

static ddp_result fetch(void *user, int64_t index, void *const *fields) {
    (void)user;
    *(float *)fields[0] = (float)index;
    return DDP_OK;
}

/* The child destroys everything; its failures stay in the child. */
static void child_ends(ddp_group *group, const things *t) {
    ddp_batch batch;
    alarm(40);
    for (int i = 0; i < 9 && !failures; i++) { /* some batches are ready already */
        ddp_result result = ddp_loader_next(t->loader, &batch);
        if (result != DDP_ERR_INVALID || !strstr(ddp_last_error(), "was forked from process")) {
            fprintf(stderr, "FAIL ddp_loader_next: %s: %s\n", ddp_result_name(result), ddp_last_error());
            failures++;
        }
    }
    ddp_loader_destroy(t->loader);
    ddp_group_signal(group, t->word, 77);
    ddp_group_poison(group, DDP_ERR_ENGINE, "the child failed");
    ddp_fsdp_destroy(t->fsdp);
}

static int child(ddp_group *group, void *memory, ddp_work *work) {
    float x = 1;
    int done;
    void *more;
    ddp_group *half;
    ddp_work mine = DDP_ZERO;
    REFUSED(ddp_barrier(group));
    REFUSED(ddp_all_reduce(group, &x, &x, 1, DDP_F32, DDP_OP_SUM, NULL));
    REFUSED(ddp_broadcast(group, &x, 1, DDP_F32, 0, &mine));
    REFUSED(ddp_send(group, &x, 1, DDP_F32, 1, 0, NULL));
    REFUSED(ddp_recv(group, &x, 1, DDP_F32, 1, 0, &mine));
    REFUSED(ddp_wait(group, work));
    REFUSED(ddp_test(group, work, &done));
    REFUSED(ddp_p2p_begin(group));
    REFUSED(ddp_p2p_end(group));
    REFUSED(ddp_group_alloc(group, 64, &more));
    REFUSED(ddp_group_free(group, memory));
    REFUSED(ddp_group_split(group, 0, 0, &half));
    REFUSED(ddp_group_status(group));
    REFUSED(ddp_group_abort(group));
    ddp_group_destroy(group);
    return failures != 0;
}

/* Ranks with an fsdp and a loader. The child begins while gradients are in flight. */
static ddp_result run_layers(ddp_group *group, void *user) {
    ddp_fsdp_param param;
    ddp_fsdp_unit_desc unit = DDP_ZERO;
    ddp_fsdp_desc desc = DDP_ZERO;
    ddp_loader_desc loader = DDP_ZERO;
    ddp_tensor field = DDP_ZERO;
    ddp_batch batch;
    things t;
    float value[12] = {0};
    int status = 0;
    (void)user;
    memset(&param, 0, sizeof param);
    param.param.name = "weight";
    param.param.value.data = value;
    param.param.value.dtype = field.dtype = DDP_F32;
    param.param.value.ndim = 1;
    param.param.value.shape[0] = 12;
    unit.params = &param;
    unit.param_count = 1;
    desc.units = &unit;
    desc.unit_count = 1;
    desc.optimizer.kind = DDP_OPTIMIZER_SGD;
    loader.sampler.dataset_size = 1000;
    loader.batch_size = 4;
    loader.fields = &field;
    loader.field_count = 1;
    loader.fetch = fetch;
    loader.worker_count = 2;
    loader.timeout_ms = 3000;
    RANKS_OK(group, ddp_fsdp_create(&t.fsdp, group, &desc));
    RANKS_OK(group, ddp_loader_create(&t.loader, &loader));
    RANKS_OK(group, ddp_group_alloc(group, 64, (void **)&t.word));
    RANKS_OK(group, ddp_loader_next(t.loader, &batch));
    RANKS_OK(group, ddp_fsdp_unshard(t.fsdp, 0));
    for (int i = 0; i < 12; i++) ((float *)param.param.grad.data)[i] = (float)(ddp_rank(group) + 1);
    RANKS_OK(group, ddp_fsdp_reduce_grads(t.fsdp, 0));
    pid_t pid = fork();
    if (pid == 0) {
        child_ends(group, &t);
        fflush(NULL);
        _exit(failures != 0);
    }
    RANKS_CHECK(group, waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0,
                "the child: %x", status);
    RANKS_OK(group, ddp_fsdp_reshard(t.fsdp, 0));
    RANKS_OK(group, ddp_fsdp_step(t.fsdp, 1));
    RANKS_OK(group, ddp_fsdp_unshard(t.fsdp, 0));
    RANKS_CHECK(group, ((float *)param.param.value.data)[5] == -2, "the value is %g",
                (double)((float *)param.param.value.data)[5]);
    RANKS_CHECK(group, *t.word == 0, "the child raised a word to %d", (int)*t.word);
    RANKS_OK(group, ddp_loader_next(t.loader, &batch));
    ddp_loader_destroy(t.loader);
    ddp_fsdp_destroy(t.fsdp);
    return ddp_group_free(group, t.word);
}

static ddp_result run(ddp_group *group, void *user) {
    float x = 1;
    void *memory;
    ddp_work work = DDP_ZERO;
    int status = 0;
    (void)user;
    RANKS_OK(group, ddp_group_alloc(group, 4096, &memory));
    RANKS_OK(group, ddp_all_reduce(group, &x, &x, 1, DDP_F32, DDP_OP_SUM, &work));
    if (ddp_rank(group) == 0) {
        pid_t pid = fork();
        if (pid == 0) {
            int failed = child(group, memory, &work);
            fflush(NULL);
            _exit(failed);
        }
        RANKS_CHECK(group, waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0,
                    "the child: %x", status);
    }
    RANKS_OK(group, ddp_wait(group, &work));
    RANKS_OK(group, ddp_barrier(group));
    RANKS_CHECK(group, x == 3, "the sum is %g", (double)x);
    return ddp_group_free(group, memory);
}

int main(int argc, char **argv) {
    ranks_mode mode = RANKS_PROCESSES;
    watchdog_start(60);
    if (argc > 1 && ranks_mode_parse(argv[1], &mode) != 0) return 2;
    if (ranks_run(mode, 3, 20000, run, NULL) == DDP_OK
        && ranks_run(mode, 3, 20000, run_layers, NULL) == DDP_OK)
        return 0;
    fprintf(stderr, "%s\n", ddp_last_error());
    return 1;
}
