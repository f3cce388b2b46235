/*  test_char_gpt.c - proves the backward pass of examples/train_char_gpt.c against differences of the loss

    A step along the gradient changes the loss by the length of the step times the norm of the gradient. This
    is checked for each parameter, for the query, key and value columns of a QKV matrix, and for single
    weights: a few of each parameter. The sanitizers compute 50 times slower: there one step moves all
    parameters at once. */
#include "../support/unit.h"

#define main train_char_gpt_main
#include "../../examples/train_char_gpt.c"
#undef main

static corpus text;
static float gradient[MAX_WEIGHTS], start[MAX_WEIGHTS]; /* start: the weights without a step */
static double worst;                                    /* relative error */

/* Random characters. The micro-batch repeats one window, so its mean loss is that of the window. */
static trainer *create(void) {
    trainer *t = (trainer *)calloc(1, sizeof *t);
    assert_non_null(t);
    text.used = 40;
    text.vocab = 48;
    text.count = MIN_TEXT;
    text.train_count = MIN_TEXT - MIN_TEXT / 10;
    text.steps = 1;
    for (int i = 0; i < MIN_TEXT; i++) text.tokens[i] = (uint8_t)(40 * uniform(99, (uint64_t)i));
    for (int i = 0; i < 40; i++) text.character[i] = (uint8_t)('0' + i);
    t->text = &text;
    assert_int_equal(ddp_group_create(&t->world, NULL), DDP_OK);
    create_model(t);
    for (int i = 0; i < t->weight_count; i++) t->weights[i] *= 4; /* attention prefers some characters */
    memcpy(start, t->weights, sizeof start);
    for (int window = 0; window < MICRO; window++) take_window(t, window, 5);
    return t;
}

/* Of a micro-batch: reducer and accumulator of a step with one micro-batch copy its gradients. */
static void compute_gradient(trainer *t) {
    ddp_reducer_desc reducer = {.params = t->params, .param_count = PARAMS, .micro_batch_count = 1};
    ddp_accumulator_desc accumulator = {.params = t->params, .param_count = PARAMS, .micro_batch_count = 1};
    assert_int_equal(ddp_reducer_create(&t->reducer, t->world, &reducer), DDP_OK);
    accumulator.reducer = t->reducer;
    assert_int_equal(ddp_accumulator_create(&t->accumulator, t->world, &accumulator), DDP_OK);
    forward(t, MICRO);
    cross_entropy(t, &t->loss);
    assert_int_equal(backward(t), DDP_OK);
    assert_int_equal(ddp_reducer_wait(t->reducer), DDP_OK);
    float *out = gradient;
    for (int i = 0; i < PARAMS; i++) {
        size_t count = (size_t)ddp_tensor_count(&t->params[i].value);
        memcpy(out, t->params[i].grad.data, sizeof(float) * count);
        out += count;
    }
}

/* The mean loss of the window, in double precision from the logits on. */
static double window_loss(trainer *t) {
    double total = 0;
    forward(t, 1);
    for (int r = 0; r < CONTEXT; r++) {
        const float *x = t->logits + r * text.vocab;
        double z = 0;
        for (int j = 0; j < text.vocab; j++) z += exp(x[j]);
        total += log(z) - x[t->targets[r]];
    }
    return total / CONTEXT;
}

/* Moves count weights from index on by length along their gradient, in rows of the given stride. Returns the
   change of the loss that the gradient predicts. */
static double move(trainer *t, int index, int rows, int stride, int count, double length) {
    double norm = 0, change = 0;
    for (int r = 0; r < rows; r++)
        for (int i = index + r * stride; i < index + r * stride + count; i++)
            norm += (double)gradient[i] * gradient[i];
    norm = sqrt(norm);
    if (!(norm > 1e-5)) fail_msg("weight %d: the gradient has the norm %g", index, norm);
    for (int r = 0; r < rows; r++)
        for (int i = index + r * stride; i < index + r * stride + count; i++) {
            t->weights[i] = start[i] + (float)(length / norm * gradient[i]);
            change += (double)gradient[i] * ((double)t->weights[i] - start[i]);
        }
    return change;
}

static void check(trainer *t, const char *name, int index, int rows, int stride, int count, double length) {
    double predicted = move(t, index, rows, stride, count, length), change = window_loss(t);
    predicted -= move(t, index, rows, stride, count, -length);
    change -= window_loss(t);
    memcpy(t->weights, start, sizeof start);
    double error = fabs(change - predicted) / predicted;
    if (error > worst) worst = error;
    if (!(error < 0.002))
        fail_msg("%s, weight %d: the loss changes by %g, not by %g", name, index, change, predicted);
}

static void test_gradients(void **state) {
    trainer *t = create();
    int slow = DDP_TEST_SLOWDOWN > 1, first = 0;
    (void)state;
    compute_gradient(t);
    for (int p = 0; p < PARAMS && !slow; p++) {
        int rows = (int)t->params[p].value.shape[0], columns = (int)t->params[p].value.shape[1];
        int parts = columns == 3 * WIDTH ? 3 : 1, width = columns / parts;
        for (int part = 0; part < parts; part++)
            check(t, t->names[p], first + part * width, rows, columns, width, 0.01);
        for (int k = 0; k < 3; k++) { /* of random weights, the one with the largest gradient */
            int best = first;
            for (uint64_t i = 0; i < 1000; i++) {
                int other = first + (int)(rows * columns * uniform((uint64_t)(p * 3 + k) + 100, i));
                if (fabsf(gradient[other]) > fabsf(gradient[best])) best = other;
            }
            check(t, t->names[p], best, 1, 0, 1, 0.02);
        }
        first += rows * columns;
    }
    if (slow) check(t, "all parameters", 0, 1, 0, t->weight_count, 0.005);
    printf("worst relative error %.2g\n", worst);
    print_sample(t); /* one character */
    ddp_accumulator_destroy(t->accumulator);
    ddp_reducer_destroy(t->reducer);
    ddp_group_destroy(t->world);
    free(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_gradients)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
