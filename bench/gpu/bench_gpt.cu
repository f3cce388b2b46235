/*  bench_gpt.cu - a bare step of examples/gpt/gpt_cuda.cuh. The additional time of train_gpt_cuda is the cost
    of its reducer or shards.

    bench_gpt [--layers 12] [--heads 12] [--channels 768] [--vocab 50257] [--batch 32] [--length 1024]
              [--recompute] [--no-graphs] [--notes] [--tune FILE] [--gemm-table FILE]

    Prints a line of JSON about the model and the device, with the rate of a copy there. Then reads lines
    "steps N" and answers each with a line of JSON, as peer_gpt_torch.py does: milliseconds of N steps by
    events, the last loss, bytes of device memory.
    A step is forward, backward, the sum of the two gradients of the tied matrix, the norm of all gradients
    and AdamW on f32 master values with a bf16 copy: the arithmetic of a trainer on one GPU that has no
    gradients to reduce. The batch stays the same; the norm is not used. Values and tokens are random. Nothing
    waits for the device inside a step.
    --notes prints the model's own count of FLOPs and bytes of one step, kernel by kernel, as lines of JSON,
    and ends. --tune times the algorithms of cuBLASLt for every product of a step and writes the fastest ones
    to a table, for --gemm-table here and of train_gpt_cuda. It prints a line of JSON per product, and ends.
    Status 77: no device. */
#define DDP_IMPLEMENTATION
#include "../../examples/gpt/gpt_cuda.cuh"
#include "../../examples/gpt/options.h"

#define NOTES 256
enum { PRODUCTS = 64, ALGORITHMS = 16, TURNS = 5, REPEATS = 10 };

/* Work of all kernels of one name in a step. */
typedef struct note_line {
    char name[96];
    int launches;
    double flops, bytes;
} note_line;

typedef struct bench {
    gpt_config config;
    int batch, length, recompute, no_graphs, notes;
    ddp_group *self, *gpu; /* of one rank */
    gpt_cuda *model;
    cudaStream_t stream;
    size_t count, matrices;        /* elements: all, and those of the matrices, which are stored first */
    unsigned char *values, *grads; /* bf16, count each; grads is followed by the head's gradient */
    float *master, *first, *second;
    void **value, **grad; /* three per parameter, the format of gpt_cuda_unit_forward */
    int32_t *tokens;
    double *loss; /* pinned */
    ddp_cuda_norm *norm;
    int64_t step;
    note_line lines[NOTES];
    int line_count;
    const char *tune, *gemm_table;
    ddp_cuda_gemm_desc products[PRODUCTS]; /* of a step, one of each kind */
    int product_count;
} bench;

static void must(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "bench_gpt: %s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

static void ok(ddp_result result) {
    if (result == DDP_OK) return;
    fprintf(stderr, "bench_gpt: %s\n", ddp_last_error());
    exit(1);
}

static void *device_memory(size_t size_bytes) {
    void *memory;
    must(cudaMalloc(&memory, size_bytes), "cudaMalloc");
    must(cudaMemset(memory, 0, size_bytes), "cudaMemset");
    return memory;
}

static void take_note(void *user, const char *kernel, double flops, double bytes) {
    bench *b = (bench *)user;
    int i = 0;
    while (i < b->line_count && strcmp(b->lines[i].name, kernel)) i++;
    if (i == NOTES) return;
    if (i == b->line_count) snprintf(b->lines[b->line_count++].name, sizeof b->lines[i].name, "%s", kernel);
    b->lines[i].launches++, b->lines[i].flops += flops, b->lines[i].bytes += bytes;
}

/* Keeps a product, unless there is one of its kind. Its memory stays valid after the step. */
static void take_product(void *user, const ddp_cuda_gemm_desc *product) {
    bench *b = (bench *)user;
    for (int i = 0; i < b->product_count; i++) {
        const ddp_cuda_gemm_desc *d = &b->products[i];
        if (d->m == product->m && d->n == product->n && d->k == product->k && d->lda == product->lda
            && d->ldb == product->ldb && d->ldc == product->ldc && d->trans_a == product->trans_a
            && d->trans_b == product->trans_b && d->epilogue == product->epilogue
            && !d->addend == !product->addend)
            return;
    }
    if (b->product_count == PRODUCTS) ok(ddp_fail(DDP_ERR_INVALID, "a step has too many products"));
    b->products[b->product_count++] = *product;
}

/* Places the parameters, each aligned to 16 bytes. Matrices come first; only they decay. The head uses the
   matrix of the embedding, with a gradient of its own. */
static void place_parameters(bench *b) {
    int params = gpt_param_count(&b->config);
    size_t head = 0;
    b->value = (void **)calloc((size_t)params * 3, sizeof *b->value);
    b->grad = (void **)calloc((size_t)params * 3, sizeof *b->grad);
    size_t *at = (size_t *)calloc((size_t)params, sizeof *at);
    if (!b->value || !b->grad || !at) exit(1);
    for (int pass = 2; pass >= 1; pass--) {
        for (int i = 0; i < params; i++) {
            gpt_param p;
            gpt_param_info(&b->config, i, &p);
            if (p.tied_to >= 0) head = (size_t)p.count;
            if (p.ndim == pass && p.tied_to < 0) {
                at[i] = b->count;
                b->count += ((size_t)p.count + 7) / 8 * 8;
            }
        }
        if (pass == 2) b->matrices = b->count;
    }
    b->values = (unsigned char *)device_memory(b->count * 2);
    b->grads = (unsigned char *)device_memory((b->count + head) * 2);
    b->master = (float *)device_memory(b->count * 4);
    b->first = (float *)device_memory(b->count * 4);
    b->second = (float *)device_memory(b->count * 4);
    for (int i = 0; i < params; i++) {
        gpt_param p;
        gpt_param_info(&b->config, i, &p);
        b->value[3 * i] = b->values + 2 * at[p.tied_to >= 0 ? p.tied_to : i];
        b->grad[3 * i] = p.tied_to >= 0 ? b->grads + 2 * b->count : b->grads + 2 * at[i];
        if (p.tied_to >= 0) continue;
        float *drawn = (float *)malloc((size_t)p.count * sizeof(float));
        if (!drawn) exit(1);
        gpt_param_init(&b->config, 1, i, 0, p.count, drawn);
        must(cudaMemcpy(b->master + at[i], drawn, (size_t)p.count * sizeof(float), cudaMemcpyHostToDevice),
             "cudaMemcpy");
        free(drawn);
    }
    ddp_device_cuda()->cast(b->values, DDP_BF16, b->master, DDP_F32, b->count);
    ok(ddp_cuda_check());
    free(at);
}

/* One batch of random tokens on the device, sorted for the model. */
static void place_tokens(bench *b) {
    int n = b->batch * b->length;
    size_t ints = gpt_cuda_batch_ints(n);
    int32_t *host = (int32_t *)malloc(ints * sizeof *host);
    if (!host) exit(1);
    for (int i = 0; i < n; i++) {
        host[i] = (int32_t)(gpt_random(2, (uint64_t)i) % (uint64_t)b->config.vocab);
        host[n + i] = (int32_t)(gpt_random(2, (uint64_t)i + 1) % (uint64_t)b->config.vocab);
    }
    if (gpt_cuda_batch_sort(host, n, b->config.vocab) != 0) exit(1);
    b->tokens = (int32_t *)device_memory(ints * sizeof *host);
    must(cudaMemcpy(b->tokens, host, ints * sizeof *host, cudaMemcpyHostToDevice), "cudaMemcpy");
    free(host);
}

/* Sum of squares of all gradients; AdamW on matrices and on vectors. */
static void update(bench *b) {
    ddp_cuda_step_desc steps[2] = DDP_ZERO;
    size_t head = (size_t)b->config.vocab * (size_t)b->config.channels;
    void *tied = b->grads;
    const void *uses[2] = {b->grads, b->grads + 2 * b->count};
    ok(ddp_cuda_reduce_tree(&tied, 1, uses, 2, head, DDP_BF16, DDP_OP_SUM, 0, b->stream));
    must(cudaMemsetAsync(b->norm, 0, sizeof *b->norm, b->stream), "cudaMemsetAsync");
    const int64_t columns = b->config.channels;
    const ddp_tensor all = {b->grads, DDP_BF16, 2, {(int64_t)b->count / columns, columns}};
    ddp_device_cuda()->sum_squares(&b->norm->squares, 0, &all, 1);
    ok(ddp_cuda_check());
    b->step++;
    for (int vectors = 0; vectors < 2; vectors++) {
        size_t from = vectors ? b->matrices : 0;
        ddp_cuda_step_desc &d = steps[vectors];
        d.grad_dtype = DDP_BF16;
        d.step = b->step;
        d.lr = 6e-4f;
        d.beta2 = 0.95f;
        d.master = b->master + from;
        d.first = b->first + from;
        d.second = b->second + from;
        d.grad = b->grads + 2 * from;
        d.copy = b->values + 2 * from;
        d.count = vectors ? b->count - b->matrices : b->matrices;
        d.weight_decay = vectors ? 0 : 0.1f;
    }
    ok(ddp_cuda_adamw(steps, 2, b->stream));
}

static int first_param(const bench *b, int unit) {
    return unit == 0                      ? 0
           : unit == b->config.layers + 1 ? gpt_param_count(&b->config) - 3
                                          : gpt_block_first_param(unit - 1);
}

static void step(bench *b) {
    int units = b->config.layers + 2;
    for (int u = 0; u < units; u++)
        ok(gpt_cuda_unit_forward(b->model, u, 0, b->value + 3 * first_param(b, u), b->tokens, NULL, NULL));
    ok(gpt_cuda_loss(b->model, 0, b->loss));
    for (int u = units - 1; u >= 0; u--) {
        int first = 3 * first_param(b, u);
        ok(gpt_cuda_unit_backward(b->model, u, 0, b->value + first, b->grad + first, b->tokens, NULL, NULL,
                                  NULL));
    }
    update(b);
}

static void answer(bench *b, int count) {
    cudaEvent_t *events = (cudaEvent_t *)calloc((size_t)count + 1, sizeof *events);
    double n = (double)b->batch * b->length;
    size_t free_bytes, total_bytes;
    if (!events) exit(1);
    for (int i = 0; i <= count; i++) must(cudaEventCreate(&events[i]), "cudaEventCreate");
    must(cudaEventRecord(events[0], b->stream), "cudaEventRecord");
    for (int i = 1; i <= count; i++) {
        step(b);
        must(cudaEventRecord(events[i], b->stream), "cudaEventRecord");
    }
    must(cudaStreamSynchronize(b->stream), "cudaStreamSynchronize");
    must(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    printf("{\"ms\": [");
    for (int i = 0; i < count; i++) {
        float ms = 0;
        must(cudaEventElapsedTime(&ms, events[i], events[i + 1]), "cudaEventElapsedTime");
        printf("%s%.4f", i ? ", " : "", (double)ms);
    }
    printf("], \"loss\": %.4f, \"peak_bytes\": %zu}\n", *b->loss / n, total_bytes - free_bytes);
    fflush(stdout);
    for (int i = 0; i <= count; i++) cudaEventDestroy(events[i]);
    free(events);
}

/* Bytes per second, read and written, of a copy on the device. The buffers are larger than the caches. */
static double copy_rate(cudaStream_t stream) {
    const size_t size_bytes = (size_t)256 << 20;
    const int copies = 20;
    void *from = device_memory(size_bytes), *to = device_memory(size_bytes);
    cudaEvent_t begin, end;
    float ms = 0;
    must(cudaEventCreate(&begin), "cudaEventCreate");
    must(cudaEventCreate(&end), "cudaEventCreate");
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    for (int i = -3; i < copies; i++) {
        if (i == 0) must(cudaEventRecord(begin, stream), "cudaEventRecord");
        must(cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
    }
    must(cudaEventRecord(end, stream), "cudaEventRecord");
    must(cudaEventSynchronize(end), "cudaEventSynchronize");
    must(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    must(cudaFree(from), "cudaFree");
    must(cudaFree(to), "cudaFree");
    return 2.0 * copies * (double)size_bytes / (ms * 1e-3);
}

/* A group of this GPU, for ddp_cuda_gemm. Staged: it needs no communicator of NCCL. */
static void open_group(bench *b) {
    ddp_group_desc self = DDP_ZERO;
    ddp_cuda_desc gpu = DDP_ZERO;
    self.init_method = "self://";
    gpu.engine = DDP_CUDA_ENGINE_STAGED;
    gpu.stream = b->stream;
    ok(ddp_group_create(&b->self, &self));
    ok(ddp_cuda_group_create(&b->gpu, b->self, &gpu));
}

static void open_model(bench *b) {
    gpt_cuda_desc d = DDP_ZERO;
    cudaDeviceProp properties;
    const char *wrong;
    double rate = b->tune ? 0 : copy_rate(b->stream); /* before the model allocates memory */
    int device;
    d.config = b->config;
    d.batch = b->batch;
    d.length = b->length;
    d.recompute = b->recompute;
    d.graphs = !b->no_graphs && !b->notes && !b->tune;
    d.group = b->gpu;
    d.stream = b->stream;
    if (b->notes) {
        d.note = take_note;
        d.note_user = b;
    }
    if (b->tune) {
        d.note_product = take_product;
        d.note_user = b;
    }
    if (b->gemm_table) ok(ddp_cuda_gemm_load(b->gpu, b->gemm_table, NULL));
    wrong = gpt_cuda_check(&d);
    if (wrong) {
        fprintf(stderr, "bench_gpt: %s\n", wrong);
        exit(1);
    }
    ok(gpt_cuda_create(&b->model, &d));
    place_parameters(b);
    place_tokens(b);
    must(cudaHostAlloc((void **)&b->loss, sizeof *b->loss, cudaHostAllocDefault), "cudaHostAlloc");
    b->norm = (ddp_cuda_norm *)device_memory(sizeof *b->norm);
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    must(cudaGetDevice(&device), "cudaGetDevice");
    must(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    printf("{\"bench_gpt\": 1, \"parameters\": %zu, \"flops\": %.0f, ", b->count, gpt_cuda_flops(&d));
    printf("\"device\": \"%s\", \"copy_gbytes\": %.0f}\n", properties.name, rate * 1e-9);
    fflush(stdout);
}

/* Microseconds of a product, of REPEATS in a row. Less than 0: cuBLASLt does not run this algorithm. */
static double time_product(bench *b, const ddp_cuda_gemm_desc *product, cudaEvent_t begin, cudaEvent_t end) {
    float ms = 0;
    if (ddp_cuda_gemm(b->gpu, product, b->stream) != DDP_OK) return -1;
    must(cudaEventRecord(begin, b->stream), "cudaEventRecord");
    for (int i = 0; i < REPEATS; i++) ok(ddp_cuda_gemm(b->gpu, product, b->stream));
    must(cudaEventRecord(end, b->stream), "cudaEventRecord");
    must(cudaEventSynchronize(end), "cudaEventSynchronize");
    must(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    return ms * 1e3 / REPEATS;
}

/* Times all algorithms of a product in turns, so that a change of the clock rate meets all of them. Returns
   the fastest one by its shortest turn. */
static ddp_cuda_gemm_algo tune_product(bench *b, ddp_cuda_gemm_desc product) {
    ddp_cuda_gemm_algo algos[ALGORITHMS];
    double fastest[ALGORITHMS];
    int count, best = 0, separate = -1;
    cudaEvent_t begin, end;
    must(cudaEventCreate(&begin), "cudaEventCreate");
    must(cudaEventCreate(&end), "cudaEventCreate");
    ok(ddp_cuda_gemm_algos(b->gpu, &product, algos, ALGORITHMS, &count));
    for (int turn = 0; turn < TURNS; turn++)
        for (int i = 0; i < count; i++) {
            product.algo = &algos[i];
            double us = time_product(b, &product, begin, end);
            if (turn == 0 || us < fastest[i]) fastest[i] = us;
        }
    for (int i = 0; i < count; i++) {
        if (fastest[i] >= 0 && (fastest[best] < 0 || fastest[i] < fastest[best])) best = i;
        if (algos[i].separate && fastest[i] >= 0 && (separate < 0 || fastest[i] < fastest[separate]))
            separate = i;
    }
    if (fastest[best] < 0) ok(ddp_fail(DDP_ERR_ENGINE, "cuBLASLt runs no algorithm of a product"));
    printf("{\"m\": %lld, \"n\": %lld, \"k\": %lld, \"epilogue\": %d, \"algorithms\": %d, ",
           (long long)product.m, (long long)product.n, (long long)product.k, (int)product.epilogue, count);
    printf("\"first_us\": %.2f, \"best_us\": %.2f, \"best\": %d, \"separate\": %d", fastest[0], fastest[best],
           best, algos[best].separate);
    if (separate >= 0) printf(", \"separate_us\": %.2f", fastest[separate]);
    printf("}\n");
    fflush(stdout);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return algos[best];
}

/* The fastest algorithm of each product of a step, in a table. */
static void tune(bench *b) {
    ddp_cuda_gemm_algo best[PRODUCTS];
    step(b);
    for (int i = 0; i < b->product_count; i++) best[i] = tune_product(b, b->products[i]);
    ok(ddp_cuda_gemm_save(b->gpu, b->tune, b->products, best, b->product_count));
}

static void close_bench(bench *b) {
    gpt_cuda_destroy(b->model);
    void *memory[] = {b->values, b->grads, b->master, b->first, b->second, b->tokens, b->norm};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) cudaFree(memory[i]);
    cudaFreeHost(b->loss);
    free(b->value);
    free(b->grad);
    ddp_group_destroy(b->gpu);
    ddp_group_destroy(b->self);
    cudaStreamDestroy(b->stream);
}

int main(int argc, char **argv) {
    bench b = DDP_ZERO;
    ddp_cuda_pick_desc pick = DDP_ZERO;
    char line[64];
    int device, count, status;
    b.config.vocab = 50257;
    b.config.layers = 12;
    b.config.heads = 12;
    b.config.channels = 768;
    b.batch = 32;
    b.length = 1024;
    const option options[] = {
        {"--layers", "N", &b.config.layers, NULL, NULL, 1, 1000, "blocks"},
        {"--heads", "N", &b.config.heads, NULL, NULL, 1, 1000, "attention heads"},
        {"--channels", "N", &b.config.channels, NULL, NULL, 1, 65536, "width"},
        {"--vocab", "N", &b.config.vocab, NULL, NULL, 1, 1 << 20, "tokens there are"},
        {"--batch", "N", &b.batch, NULL, NULL, 1, 4096, "sequences"},
        {"--length", "N", &b.length, NULL, NULL, 1, 65536, "tokens in each"},
        {"--recompute", NULL, &b.recompute, NULL, NULL, 0, 1, "keep only the inputs of blocks"},
        {"--no-graphs", NULL, &b.no_graphs, NULL, NULL, 0, 1, "launch kernels one by one"},
        {"--notes", NULL, &b.notes, NULL, NULL, 0, 1, "print FLOPs and bytes of each kernel, and end"},
        {"--tune", "FILE", NULL, NULL, &b.tune, 0, 0, "write the fastest algorithms of products, and end"},
        {"--gemm-table", "FILE", NULL, NULL, &b.gemm_table, 0, 0, "algorithms of products, from --tune"},
    };
    status = options_read("bench_gpt: steps of the GPT on a GPU with nothing around them", options,
                          (int)(sizeof options / sizeof *options), argc, argv, NULL);
    if (status >= 0) return status;
    b.config.context = b.length;
    if (ddp_cuda_pick(NULL, &pick, &device) != DDP_OK) {
        fprintf(stderr, "bench_gpt: %s\n", ddp_last_error());
        return 77;
    }
    must(cudaStreamCreateWithFlags(&b.stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    open_group(&b);
    ddp_cuda_use_stream(b.stream);
    open_model(&b);
    if (b.tune) {
        tune(&b);
        close_bench(&b);
        return 0;
    }
    if (b.notes) {
        step(&b);
        must(cudaStreamSynchronize(b.stream), "cudaStreamSynchronize");
        for (int i = 0; i < b.line_count; i++)
            printf("{\"kernel\": \"%s\", \"launches\": %d, \"flops\": %.0f, \"bytes\": %.0f}\n",
                   b.lines[i].name, b.lines[i].launches, b.lines[i].flops, b.lines[i].bytes);
        return 0;
    }
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "steps %d", &count) != 1 || count < 1) {
            fprintf(stderr, "bench_gpt: unknown command %.40s; only lines \"steps N\" are valid\n", line);
            return 1;
        }
        answer(&b, count);
    }
    return 0;
}
