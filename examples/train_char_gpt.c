/*  train_char_gpt.c - a GPT that learns to write text, character by character, with data parallelism (DDP)

        cc -O3 -march=native examples/train_char_gpt.c -o train_char_gpt -lm -lpthread
        ./train_char_gpt                     2 ranks; the text is README.md of the current directory
        ./train_char_gpt 4 ddp.h 100         4 ranks, a text of your own, 100 steps instead of 500
        mpirun -n 2 ./train_char_gpt         the ranks of a launcher

    Every rank holds the whole model and trains on its part of each batch. The reducer averages the gradients
    over the ranks while backward still computes the layers below. 1, 2 and 4 ranks end with the same bits:
    the last line prints a hash of the weights. train_mlp.c shows the same with a smaller model.

    The model is that of GPT-2 (Radford et al. 2019): token and position embedding, blocks of causal attention
    and an MLP with GELU, and a linear head. Layer norms have no weights, as in OLMo (Groeneveld et al. 2024),
    and linear layers no biases. Backward is written by hand. */
#define DDP_IMPLEMENTATION
#include "../ddp.h"
#include "../ddp_fsdp.h" /* ddp_optimizer, ddp_lr_at */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CONTEXT = 128, WIDTH = 128, HEADS = 4, HEAD_SIZE = WIDTH / HEADS, LAYERS = 4, MAX_VOCAB = 256 };
/* Windows of a micro-batch and of a step; tokens of a micro-batch; windows of a validation. */
enum { MICRO = 4, BATCH = 4 * MICRO, ROWS = MICRO * CONTEXT, VALIDATION = 32 };
enum { STEPS = 500, PROMPT = 32, SAMPLE = 400, MIN_TEXT = 10 * (CONTEXT + 2), MAX_TEXT = 1 << 26 };

/* Indices of the parameters. Those of block l begin at FIRST_BLOCK + l * PER_BLOCK. */
enum { TOKENS, POSITIONS, FIRST_BLOCK };
enum { QKV, PROJECTION, EXPAND, CONTRACT, PER_BLOCK };
enum { HEAD = FIRST_BLOCK + LAYERS * PER_BLOCK, PARAMS };
enum { MAX_WEIGHTS = (2 * MAX_VOCAB + CONTEXT + LAYERS * 12 * WIDTH) * WIDTH };

//== text =======================================================================================
typedef struct corpus {
    uint8_t tokens[MAX_TEXT], character[256]; /* the text; the byte of a token */
    int64_t count, train_count;               /* tokens in all; those after train_count are for validation */
    int used, vocab;                          /* distinct bytes; the same, rounded up to a multiple of 16 */
    double entropy;                           /* nats per byte, from the frequencies of bytes */
    int steps;                                /* of the training */
} corpus;

/* Reads at most MAX_TEXT bytes of a file. The vocabulary is its distinct bytes. */
static ddp_result open_corpus(corpus *t, const char *path) {
    int64_t counts[256] = {0};
    uint8_t token[256];
    FILE *file = fopen(path, "rb");
    if (!file) return ddp_fail(DDP_ERR_INVALID, "cannot read %s: give a text file as second argument", path);
    t->count = (int64_t)fread(t->tokens, 1, MAX_TEXT, file);
    t->train_count = t->count - t->count / 10;
    fclose(file);
    if (t->count < MIN_TEXT) return ddp_fail(DDP_ERR_INVALID, "%s has fewer than %d bytes", path, MIN_TEXT);
    for (int64_t i = 0; i < t->count; i++) counts[t->tokens[i]]++;
    for (int i = 0; i < 256; i++) {
        if (counts[i] == 0) continue;
        double share = (double)counts[i] / (double)t->count;
        t->entropy -= share * log(share);
        token[i] = (uint8_t)t->used;
        t->character[t->used++] = (uint8_t)i;
    }
    for (int64_t i = 0; i < t->count; i++) t->tokens[i] = token[t->tokens[i]];
    t->vocab = (t->used + 15) / 16 * 16;
    return DDP_OK;
}

//== arithmetic =================================================================================
/* A view of memory: element (i, j) is data[i * down + j * right]. */
typedef struct matrix {
    float *data;
    int rows, columns, down, right;
} matrix;

static matrix view(float *data, int rows, int columns) { return (matrix){data, rows, columns, columns, 1}; }
static matrix transpose(matrix m) { return (matrix){m.data, m.columns, m.rows, m.right, m.down}; }

/* out (4, n) += x (4, 4) y (4, n). The compiler vectorizes it: memory is contiguous. */
static void multiply_rows(float *restrict out, int down, float x[4][4], const float *y, int y_down, int n) {
    for (int j = 0; j < n; j++) {
        float y0 = y[j], y1 = y[y_down + j], y2 = y[2 * y_down + j], y3 = y[3 * y_down + j];
        for (int r = 0; r < 4; r++)
            out[r * down + j] += x[r][0] * y0 + x[r][1] * y1 + x[r][2] * y2 + x[r][3] * y3;
    }
}

/* out = a b. The rows and columns of a are multiples of 4. A transposed b is copied first. */
static void matmul(matrix out, matrix a, matrix b) {
    float copy[4 * WIDTH * WIDTH];
    for (int j = 0; b.right != 1 && j < b.columns; j++)
        for (int i = 0; i < b.rows; i++) copy[i * b.columns + j] = b.data[i * b.down + j * b.right];
    if (b.right != 1) b = view(copy, b.rows, b.columns);
    for (int r = 0; r < a.rows; r++) memset(out.data + r * out.down, 0, sizeof(float) * (size_t)b.columns);
    for (int r = 0; r < a.rows; r += 4)
        for (int i = 0; i < a.columns; i += 4) {
            float x[4][4];
            for (int s = 0; s < 4; s++)
                for (int q = 0; q < 4; q++) x[s][q] = a.data[(r + s) * a.down + (i + q) * a.right];
            multiply_rows(out.data + r * out.down, out.down, x, b.data + i * b.down, b.down, b.columns);
        }
}

/* Sixteen partial sums, which fit vector registers. n is a multiple of 16. */
static float sum(const float *x, int n) {
    float part[16] = {0}, total = 0;
    for (int i = 0; i < n; i += 16)
        for (int j = 0; j < 16; j++) part[j] += x[i + j];
    for (int j = 0; j < 16; j++) total += part[j];
    return total;
}

/* e to the power of x, in plain arithmetic that the compiler vectorizes, which it cannot do with expf.
   x = n log 2 + r; e^r is a polynomial (Cephes), and 2^n is made from its bits. */
static float exponential(float x) {
    x = x < -87 ? -87 : x;
    x = x > 88 ? 88 : x;
    float n = x * 1.44269504f + 12582912.0f - 12582912.0f; /* rounds to an integer */
    float r = x - n * 0.693359375f + n * 2.12194440e-4f, p = 1.9875691500e-4f * r + 1.3981999507e-3f, power;
    p = ((p * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r + 1.6666665459e-1f;
    int32_t bits = ((int32_t)n + 127) * (1 << 23);
    memcpy(&power, &bits, sizeof power);
    return (((p * r + 0.5f) * r + 1) * r + 1) * power;
}

/* Layer norm of a row: out (WIDTH) = (x - mean) * scale. Returns scale, 1 / standard deviation. */
static float norm_row(float *out, const float *x) {
    float square[WIDTH], mean = sum(x, WIDTH) / WIDTH;
    for (int c = 0; c < WIDTH; c++) out[c] = x[c] - mean;
    for (int c = 0; c < WIDTH; c++) square[c] = out[c] * out[c];
    float scale = 1 / sqrtf(sum(square, WIDTH) / WIDTH + 1e-5f);
    for (int c = 0; c < WIDTH; c++) out[c] *= scale;
    return scale;
}

/* Adds the gradient of the input x to d_x: ROWS rows. */
static void norm_backward(float *d_x, const float *d_out, const float *x) {
    float out[WIDTH], product[WIDTH];
    for (int r = 0; r < ROWS; r++, d_x += WIDTH, d_out += WIDTH, x += WIDTH) {
        float scale = norm_row(out, x);
        for (int c = 0; c < WIDTH; c++) product[c] = d_out[c] * out[c];
        float mean = sum(d_out, WIDTH) / WIDTH, slope = sum(product, WIDTH) / WIDTH;
        for (int c = 0; c < WIDTH; c++) d_x[c] += scale * (d_out[c] - mean - out[c] * slope);
    }
}

/* Counter-based random number in [0, 1): SplitMix64 (Steele, Lea, Flood 2014). */
static double uniform(uint64_t key, uint64_t counter) {
    uint64_t x = (key << 40 ^ counter) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (double)((x ^ x >> 31) >> 11) / 9007199254740992.0;
}

//== model ======================================================================================
/* The activations of a block. */
typedef struct block {
    float norm1[ROWS * WIDTH], qkv[ROWS * 3 * WIDTH];   /* query, key, value */
    float attention[MICRO * HEADS * CONTEXT * CONTEXT]; /* (window, head, to, from): probabilities */
    float mixed[ROWS * WIDTH], middle[ROWS * WIDTH];    /* values, mixed; the stream after attention */
    float norm2[ROWS * WIDTH], wide[ROWS * 4 * WIDTH], gelu[ROWS * 4 * WIDTH];
} block;

typedef struct trainer {
    ddp_group *world;
    const corpus *text;
    ddp_sampler sampler;
    uint64_t epoch;
    ddp_param params[PARAMS];
    char names[PARAMS][16];
    int param_count, weight_count;
    float weights[MAX_WEIGHTS];             /* all parameters, one after the other */
    uint8_t tokens[ROWS], targets[ROWS];    /* a target is the token that follows */
    float stream[LAYERS + 1][ROWS * WIDTH]; /* the input of each block and of the final norm */
    block blocks[LAYERS];
    float norm[ROWS * WIDTH], logits[ROWS * MAX_VOCAB];                            /* (ROWS, vocab) */
    float d_stream[ROWS * WIDTH], d_small[ROWS * WIDTH], d_wide[ROWS * 4 * WIDTH]; /* gradients */
    ddp_reducer *reducer;
    ddp_accumulator *accumulator;
    ddp_optimizer *optimizer;
    ddp_mean loss; /* of the training steps since the last report */
} trainer;

/* out = in weight */
static void linear(trainer *t, int param, float *out, float *in, int rows) {
    const ddp_tensor *w = &t->params[param].value;
    int inputs = (int)w->shape[0], outputs = (int)w->shape[1];
    matmul(view(out, rows, outputs), view(in, rows, inputs), view((float *)w->data, inputs, outputs));
}

/* The reducer sends a bucket as soon as its gradients are ready, while the rest is computed. */
static ddp_result linear_backward(trainer *t, int param, float *d_in, float *d_out, float *in) {
    ddp_param *w = &t->params[param];
    int inputs = (int)w->value.shape[0], outputs = (int)w->value.shape[1];
    matrix weight = view((float *)w->value.data, inputs, outputs), d = view(d_out, ROWS, outputs);
    matmul(view((float *)w->grad.data, inputs, outputs), transpose(view(in, ROWS, inputs)), d);
    DDP_TRY(ddp_accumulator_ready(t->accumulator, param));
    matmul(view(d_in, ROWS, inputs), d, transpose(weight));
    return DDP_OK;
}

/* Part `part` of x (ROWS, width) that belongs to one window and head: (CONTEXT, HEAD_SIZE). */
static matrix head_of(float *x, int width, int part, int i) {
    float *data = x + i / HEADS * CONTEXT * width + part * WIDTH + i % HEADS * HEAD_SIZE;
    return (matrix){data, CONTEXT, HEAD_SIZE, width, 1};
}

/* For each window and head: mixed = softmax(query key^T / sqrt(HEAD_SIZE)) values, causal. */
static void attention(block *b, int windows) {
    for (int i = 0; i < windows * HEADS; i++) {
        matrix query = head_of(b->qkv, 3 * WIDTH, 0, i), key = head_of(b->qkv, 3 * WIDTH, 1, i);
        matrix scores = view(b->attention + i * CONTEXT * CONTEXT, CONTEXT, CONTEXT);
        matmul(scores, query, transpose(key));
        for (int to = 0; to < CONTEXT; to++) {
            float *p = scores.data + to * CONTEXT, max = p[0];
            for (int from = 1; from <= to; from++) max = p[from] > max ? p[from] : max;
            for (int from = 0; from <= to; from++) p[from] = exponential((p[from] - max) / sqrtf(HEAD_SIZE));
            for (int from = to + 1; from < CONTEXT; from++) p[from] = 0;
            float total = sum(p, CONTEXT);
            for (int from = 0; from <= to; from++) p[from] /= total;
        }
        matmul(head_of(b->mixed, WIDTH, 0, i), scores, head_of(b->qkv, 3 * WIDTH, 2, i));
    }
}

static void attention_backward(block *b, float *d_qkv, float *d_mixed) {
    float d_scores[CONTEXT * CONTEXT], product[CONTEXT];
    for (int i = 0; i < MICRO * HEADS; i++) {
        matrix query = head_of(b->qkv, 3 * WIDTH, 0, i), key = head_of(b->qkv, 3 * WIDTH, 1, i);
        matrix scores = view(b->attention + i * CONTEXT * CONTEXT, CONTEXT, CONTEXT);
        matrix d_out = head_of(d_mixed, WIDTH, 0, i), d = view(d_scores, CONTEXT, CONTEXT);
        matmul(head_of(d_qkv, 3 * WIDTH, 2, i), transpose(scores), d_out);
        matmul(d, d_out, transpose(head_of(b->qkv, 3 * WIDTH, 2, i)));
        for (int to = 0; to < CONTEXT; to++) {
            float *p = scores.data + to * CONTEXT, *d_p = d_scores + to * CONTEXT;
            for (int from = 0; from < CONTEXT; from++) product[from] = d_p[from] * p[from];
            float total = sum(product, CONTEXT);
            for (int from = 0; from < CONTEXT; from++)
                d_p[from] = p[from] * (d_p[from] - total) / sqrtf(HEAD_SIZE);
        }
        matmul(head_of(d_qkv, 3 * WIDTH, 0, i), d, key);
        matmul(head_of(d_qkv, 3 * WIDTH, 1, i), transpose(d), query);
    }
}

/* GELU in its tanh form (Hendrycks and Gimpel 2016), which is x sigmoid(1.5958 (x + 0.044715 x^3)). */
static float gate(float x) { return 1 / (1 + exponential(-1.5957691f * (x + 0.044715f * x * x * x))); }
static float gelu_slope(float x, float s) { /* s: gate(x) */
    return s + x * s * (1 - s) * 1.5957691f * (1 + 3 * 0.044715f * x * x);
}

/* From t->tokens to t->logits. */
static void forward(trainer *t, int windows) {
    int rows = windows * CONTEXT;
    const float *tokens = t->params[TOKENS].value.data, *positions = t->params[POSITIONS].value.data;
    for (int i = 0; i < rows * WIDTH; i++)
        t->stream[0][i] = tokens[t->tokens[i / WIDTH] * WIDTH + i % WIDTH] + positions[i % (CONTEXT * WIDTH)];
    for (int l = 0; l < LAYERS; l++) {
        int first = FIRST_BLOCK + l * PER_BLOCK;
        float *in = t->stream[l], *out = t->stream[l + 1];
        block *b = &t->blocks[l];
        for (int i = 0; i < rows * WIDTH; i += WIDTH) norm_row(b->norm1 + i, in + i);
        linear(t, first + QKV, b->qkv, b->norm1, rows);
        attention(b, windows);
        linear(t, first + PROJECTION, b->middle, b->mixed, rows);
        for (int i = 0; i < rows * WIDTH; i++) b->middle[i] += in[i];
        for (int i = 0; i < rows * WIDTH; i += WIDTH) norm_row(b->norm2 + i, b->middle + i);
        linear(t, first + EXPAND, b->wide, b->norm2, rows);
        for (int i = 0; i < rows * 4 * WIDTH; i++) b->gelu[i] = b->wide[i] * gate(b->wide[i]);
        linear(t, first + CONTRACT, out, b->gelu, rows);
        for (int i = 0; i < rows * WIDTH; i++) out[i] += b->middle[i];
    }
    for (int i = 0; i < rows * WIDTH; i += WIDTH) norm_row(t->norm + i, t->stream[LAYERS] + i);
    linear(t, HEAD, t->logits, t->norm, rows);
}

/* Adds the loss of a micro-batch, and replaces the logits by the gradient of its mean. */
static void cross_entropy(trainer *t, ddp_mean *loss) {
    int vocab = t->text->vocab;
    double total = 0;
    for (int r = 0; r < ROWS; r++) {
        float *x = t->logits + r * vocab, max = x[0], target = x[t->targets[r]];
        for (int j = 1; j < vocab; j++) max = x[j] > max ? x[j] : max;
        for (int j = 0; j < vocab; j++) x[j] = exponential(x[j] - max);
        float z = sum(x, vocab);
        for (int j = 0; j < vocab; j++) x[j] /= z * ROWS;
        x[t->targets[r]] -= 1.0f / ROWS;
        total += logf(z) + max - target;
    }
    ddp_mean_add(loss, total, ROWS);
}

/* From the gradient in t->logits to those of all parameters; each is announced as soon as it is final. */
static ddp_result backward(trainer *t) {
    float *d_tokens = t->params[TOKENS].grad.data, *d_positions = t->params[POSITIONS].grad.data;
    DDP_TRY(linear_backward(t, HEAD, t->d_small, t->logits, t->norm));
    memset(t->d_stream, 0, sizeof t->d_stream);
    norm_backward(t->d_stream, t->d_small, t->stream[LAYERS]);
    for (int l = LAYERS - 1; l >= 0; l--) {
        int first = FIRST_BLOCK + l * PER_BLOCK;
        block *b = &t->blocks[l];
        DDP_TRY(linear_backward(t, first + CONTRACT, t->d_wide, t->d_stream, b->gelu));
        for (int i = 0; i < ROWS * 4 * WIDTH; i++) t->d_wide[i] *= gelu_slope(b->wide[i], gate(b->wide[i]));
        DDP_TRY(linear_backward(t, first + EXPAND, t->d_small, t->d_wide, b->norm2));
        norm_backward(t->d_stream, t->d_small, b->middle);
        DDP_TRY(linear_backward(t, first + PROJECTION, t->d_small, t->d_stream, b->mixed));
        attention_backward(b, t->d_wide, t->d_small); /* (ROWS, 3 WIDTH) */
        DDP_TRY(linear_backward(t, first + QKV, t->d_small, t->d_wide, b->norm1));
        norm_backward(t->d_stream, t->d_small, t->stream[l]);
    }
    memset(d_tokens, 0, sizeof(float) * (size_t)(t->text->vocab * WIDTH));
    memset(d_positions, 0, sizeof(float) * CONTEXT * WIDTH);
    for (int i = 0; i < ROWS * WIDTH; i++) d_positions[i % (CONTEXT * WIDTH)] += t->d_stream[i];
    for (int i = 0; i < ROWS * WIDTH; i++)
        d_tokens[t->tokens[i / WIDTH] * WIDTH + i % WIDTH] += t->d_stream[i];
    DDP_TRY(ddp_accumulator_ready(t->accumulator, POSITIONS));
    DDP_TRY(ddp_accumulator_ready(t->accumulator, TOKENS));
    return ddp_accumulator_next(t->accumulator, NULL);
}

//== training ===================================================================================
/* Uniform initial weights with this standard deviation. */
static void add_param(trainer *t, const char *kind, int layer, int rows, int columns, double deviation) {
    int i = t->param_count++;
    float *weights = t->weights + t->weight_count;
    snprintf(t->names[i], sizeof t->names[i], "%s.%d", kind, layer);
    t->params[i] = (ddp_param){.name = t->names[i], .value = {weights, DDP_F32, 2, {rows, columns}}};
    t->weight_count += rows * columns;
    for (int k = 0; k < rows * columns; k++)
        weights[k] = (float)(deviation * sqrt(3) * (2 * uniform((uint64_t)i + 1, (uint64_t)k) - 1));
}

static void create_model(trainer *t) {
    double residual = 0.02 / sqrt(2 * LAYERS); /* of a matrix whose product is added to the stream */
    add_param(t, "tokens", 0, t->text->vocab, WIDTH, 0.02);
    add_param(t, "positions", 0, CONTEXT, WIDTH, 0.02);
    for (int l = 0; l < LAYERS; l++) {
        add_param(t, "qkv", l, WIDTH, 3 * WIDTH, 0.02);
        add_param(t, "projection", l, WIDTH, WIDTH, residual);
        add_param(t, "expand", l, WIDTH, 4 * WIDTH, 0.02);
        add_param(t, "contract", l, 4 * WIDTH, WIDTH, residual);
    }
    add_param(t, "head", 0, WIDTH, t->text->vocab, 0.02);
}

/* The reducer allocates the gradients, broadcasts the weights of rank 0, and averages. The accumulator adds
   the micro-batches of this rank in the order in which the reducer adds ranks: as a binary tree. With
   global_batch, the batches are the same on any number of ranks; rank r takes block r. */
static ddp_result create_strategy(trainer *t) {
    int count = BATCH / MICRO / ddp_world_size(t->world); /* micro-batches per rank and step */
    ddp_reducer_desc reducer = {.params = t->params, .param_count = PARAMS, .micro_batch_count = count};
    DDP_TRY(ddp_reducer_create(&t->reducer, t->world, &reducer));
    ddp_accumulator_desc accumulator = {t->params, PARAMS, count, t->reducer};
    DDP_TRY(ddp_accumulator_create(&t->accumulator, t->world, &accumulator));
    ddp_optimizer_desc o = {.beta2 = 0.95f, .weight_decay = 0.1f, .params = t->params, .param_count = PARAMS};
    DDP_TRY(ddp_optimizer_create(&t->optimizer, t->world, &o)); /* AdamW */
    ddp_sampler_desc sampler = {.shuffle = DDP_SHUFFLE_HASHED, .global_batch = BATCH};
    sampler.dataset_size = t->text->train_count - CONTEXT; /* the first character of a window */
    sampler.num_replicas = ddp_world_size(t->world);
    sampler.rank = ddp_rank(t->world);
    return ddp_sampler_init(&t->sampler, &sampler);
}

static void take_window(trainer *t, int window, int64_t start) {
    memcpy(t->tokens + window * CONTEXT, t->text->tokens + start, CONTEXT);
    memcpy(t->targets + window * CONTEXT, t->text->tokens + start + 1, CONTEXT);
}

static ddp_result train_step(trainer *t, float lr) {
    for (int m = 0; m < BATCH / MICRO / ddp_world_size(t->world); m++) {
        for (int window = 0; window < MICRO; window++) {
            int64_t start = ddp_sampler_next(&t->sampler, NULL);
            if (start < 0) ddp_sampler_set_epoch(&t->sampler, ++t->epoch); /* the epoch has ended */
            if (start < 0) start = ddp_sampler_next(&t->sampler, NULL);
            take_window(t, window, start);
        }
        forward(t, MICRO);
        cross_entropy(t, &t->loss);
        DDP_TRY(backward(t));
    }
    DDP_TRY(ddp_reducer_wait(t->reducer));
    DDP_TRY(ddp_reducer_clip_grad_norm(t->reducer, 1, NULL));
    return ddp_optimizer_step(t->optimizer, lr);
}

/* The mean loss of windows that are spread over the validation text. The ranks take turns. */
static ddp_result validate(trainer *t, double *loss) {
    int64_t last = t->text->count - CONTEXT - 1 - t->text->train_count;
    ddp_mean mean = {0};
    for (int m = ddp_rank(t->world); m < VALIDATION / MICRO; m += ddp_world_size(t->world)) {
        for (int window = 0; window < MICRO; window++)
            take_window(t, window, t->text->train_count + last * (m * MICRO + window) / (VALIDATION - 1));
        forward(t, MICRO);
        cross_entropy(t, &mean);
    }
    DDP_TRY(ddp_mean_reduce(t->world, &mean));
    *loss = ddp_mean_value(&mean);
    return DDP_OK;
}

/* Continues the beginning of the validation text. The temperature 0.8 prefers likely characters. */
static void print_sample(trainer *t) {
    const corpus *text = t->text;
    int end = PROMPT + (text->steps < SAMPLE ? text->steps : SAMPLE); /* a short run writes less */
    uint8_t tokens[PROMPT + SAMPLE];
    double p[MAX_VOCAB];
    memcpy(tokens, text->tokens + text->train_count, PROMPT);
    for (int at = PROMPT; at < end; at++) {
        int length = at < CONTEXT ? at : CONTEXT, token = 0;
        const float *logits = t->logits + (length - 1) * text->vocab;
        memcpy(t->tokens, tokens + at - length, (size_t)length);
        forward(t, 1);
        double left = 0;
        for (int j = 0; j < text->used; j++) p[j] = exp((logits[j] - logits[0]) / 0.8);
        for (int j = 0; j < text->used; j++) left += p[j];
        left *= uniform(0, (uint64_t)at);
        while (token < text->used - 1 && left >= p[token]) left -= p[token++];
        tokens[at] = (uint8_t)token;
    }
    printf("\n--- %d characters of the validation text, and what the model writes after them ---\n", PROMPT);
    for (int i = 0; i < end; i++) putchar(text->character[tokens[i]]);
    printf("\n---\n\n");
}

/* Rank 0: a line for each validation, and a bar for the loss. On a terminal, other lines are overwritten. */
static void print_progress(const trainer *t, int step, double loss, double validation, double seconds) {
    int is_terminal = isatty(STDOUT_FILENO), left = (int)(seconds / step * (t->text->steps - step) + 0.5);
    if (ddp_rank(t->world) != 0 || (validation == 0 && !is_terminal)) return;
    printf("%sstep %4d/%d  loss %.4f  ", is_terminal ? "\r" : "", step, t->text->steps, loss);
    if (validation > 0) printf("validation %.4f  ", validation);
    printf("%.0f tokens/s  %d:%02d left  ", step / seconds * BATCH * CONTEXT, left / 60, left % 60);
    for (int i = 0; i < 10 * validation; i++) putchar('#');
    printf("%s", validation > 0 ? "\n" : "            ");
    fflush(stdout);
}

static ddp_result train(trainer *t) {
    const corpus *text = t->text;
    int is_root = ddp_rank(t->world) == 0, steps = text->steps, tenth = (steps + 9) / 10;
    ddp_lr_desc lr = {DDP_LR_COSINE, 3e-3, 3e-4, .warmup_steps = steps / 10, .total_steps = steps};
    double seconds = 0, untrained, validation = 0;
    uint64_t hash = 14695981039346656037u;
    create_model(t);
    DDP_TRY(create_strategy(t));
    DDP_TRY(validate(t, &untrained));
    if (is_root)
        printf("%lld bytes of text, %d distinct; %d weights; %d ranks; validation loss %.4f\n",
               (long long)text->count, text->used, t->weight_count, ddp_world_size(t->world), untrained);
    for (int step = 1; step <= steps; step++) {
        double start = ddp_now();
        DDP_TRY(train_step(t, ddp_lr_at(&lr, step)));
        seconds += ddp_now() - start;
        int is_tenth = step % tenth == 0 || step == steps;
        if (step % 5 && !is_tenth) continue;
        DDP_TRY(ddp_mean_reduce(t->world, &t->loss));
        validation = 0;
        if (is_tenth) DDP_TRY(validate(t, &validation));
        print_progress(t, step, ddp_mean_value(&t->loss), validation, seconds);
        t->loss = (ddp_mean){0};
    }
    for (size_t i = 0; i < sizeof(float) * (size_t)t->weight_count; i++)
        hash = (hash ^ ((const uint8_t *)t->weights)[i]) * 1099511628211u;
    if (is_root) print_sample(t);
    if (is_root)
        printf("unigram entropy %.4f nats per character\nvalidation loss %.4f\nweights %016llx\n",
               text->entropy, validation, (unsigned long long)hash);
    /* A short run must learn something; a full one must beat the frequencies of characters. */
    double limit = steps < STEPS ? untrained : text->entropy;
    if (validation < limit) return DDP_OK;
    return ddp_fail(DDP_ERR_CORRUPT, "loss %.4f, not below %.4f: give a longer text", validation, limit);
}

static ddp_result rank_main(ddp_group *world, void *user) {
    int ranks = ddp_world_size(world);
    if (BATCH / MICRO % ranks) return ddp_fail(DDP_ERR_INVALID, "%d ranks: use 1, 2 or 4", ranks);
    trainer *t = (trainer *)calloc(1, sizeof *t);
    if (!t) return ddp_fail(DDP_ERR_NO_MEMORY, "no memory for the model");
    t->world = world;
    t->text = (const corpus *)user;
    ddp_result result = train(t);
    ddp_optimizer_destroy(t->optimizer);
    ddp_accumulator_destroy(t->accumulator);
    ddp_reducer_destroy(t->reducer);
    ddp_sampler_free(&t->sampler);
    free(t);
    return result;
}

int main(int argc, char **argv) {
    static corpus text; /* the ranks share it */
    ddp_launch_desc desc = {.world_size = argc > 1 ? atoi(argv[1]) : 2};
    text.steps = argc > 3 ? atoi(argv[3]) : STEPS;
    ddp_result result = open_corpus(&text, argc > 2 ? argv[2] : "README.md");
    if (desc.world_size < 1 || text.steps < 1)
        result = ddp_fail(DDP_ERR_INVALID, "usage: %s [ranks [file [steps]]]", argv[0]);
    if (result == DDP_OK) result = ddp_launch(&desc, rank_main, &text);
    if (result != DDP_OK) fprintf(stderr, "%s: %s\n", argv[0], ddp_last_error());
    return result != DDP_OK;
}

/* MIT License: see LICENSE. */
