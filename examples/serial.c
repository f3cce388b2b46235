/*  serial.c - a trainer on one core, as you may have one: port.md makes it parallel in three steps

        cc -O3 -march=native examples/serial.c -o serial -lm
        ./serial

    The model has LAYERS residual layers h + relu(h W). It learns y[j] = x[j] + max(x[j + 1], 0). Parameters,
    gradients and momentum are flat arrays. A step adds the gradients of BATCH / MICRO micro-batches. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#ifndef WIDTH
#define WIDTH 64 /* of each layer; 512 for measurements */
#endif
enum { LAYERS = 8, LAYER = WIDTH * WIDTH, PARAMS = LAYERS * LAYER, MICRO = 8, BATCH = 32, STEPS = 60 };

static float param[PARAMS]; /* layer l is (WIDTH, WIDTH), at l * LAYER */
static float grad[PARAMS], momentum[PARAMS];
static float h[LAYERS + 1][MICRO][WIDTH]; /* h[l] is the input of layer l */
static float dh[MICRO][WIDTH];            /* the gradient of the loss by h[l + 1], then by h[l] */

/* Number i of a sequence of uniform random numbers from -1 to 1. */
static float uniform(uint32_t i) {
    i = (i ^ i >> 16) * 0x7feb352d;
    i = (i ^ i >> 15) * 0x846ca68b;
    return (float)(i >> 8) / 8388608.0f - 1;
}

static void forward(int l) {
    const float *w = param + l * LAYER;
    for (int b = 0; b < MICRO; b++) {
        const float *in = h[l][b];
        float *out = h[l + 1][b], z[WIDTH] = {0};
        for (int i = 0; i < WIDTH; i++)
            for (int j = 0; j < WIDTH; j++) z[j] += in[i] * w[i * WIDTH + j];
        for (int j = 0; j < WIDTH; j++) out[j] = in[j] + fmaxf(z[j], 0);
    }
}

/* Adds to the gradient of layer l. */
static void backward(int l) {
    const float *w = param + l * LAYER;
    float *dw = grad + l * LAYER;
    for (int b = 0; b < MICRO; b++) {
        const float *in = h[l][b], *out = h[l + 1][b];
        float dz[WIDTH];
        for (int j = 0; j < WIDTH; j++) dz[j] = out[j] > in[j] ? dh[b][j] : 0;
        for (int i = 0; i < WIDTH; i++) {
            float sum = 0;
            for (int j = 0; j < WIDTH; j++) dw[i * WIDTH + j] += in[i] * dz[j];
            for (int j = 0; j < WIDTH; j++) sum += w[i * WIDTH + j] * dz[j];
            dh[b][i] += sum;
        }
    }
}

static void load(int first_sample) {
    for (int b = 0; b < MICRO; b++)
        for (int j = 0; j < WIDTH; j++) h[0][b][j] = uniform((uint32_t)((first_sample + b) * WIDTH + j));
}

/* The part of this micro-batch in the mean square error of the batch; sets its gradient. */
static double compute_loss(void) {
    double loss = 0;
    for (int b = 0; b < MICRO; b++)
        for (int j = 0; j < WIDTH; j++) {
            float error = h[LAYERS][b][j] - h[0][b][j] - fmaxf(h[0][b][(j + 1) % WIDTH], 0);
            dh[b][j] = error / BATCH;
            loss += (double)(error * error) / (BATCH * WIDTH);
        }
    return loss;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(void) {
    double start = now(), first_loss = 0, loss = 0;
    for (int i = 0; i < PARAMS; i++) param[i] = uniform((uint32_t)i) / WIDTH;
    for (int step = 0; step < STEPS; step++) {
        loss = 0;
        memset(grad, 0, sizeof grad);
        for (int m = 0; m < BATCH / MICRO; m++) {
            load(step * BATCH + m * MICRO);
            for (int l = 0; l < LAYERS; l++) forward(l);
            loss += compute_loss();
            for (int l = LAYERS - 1; l >= 0; l--) backward(l);
        }
        for (int i = 0; i < PARAMS; i++) {
            momentum[i] = 0.9f * momentum[i] + grad[i];
            param[i] -= 0.01f * momentum[i];
        }
        if (step == 0) first_loss = loss;
        if (step % 20 == 0) printf("step %2d   loss %.6f\n", step, loss);
    }
    printf("at last   loss %.12f   %.2f ms per step\n", loss, 1000 * (now() - start) / STEPS);
    if (loss < first_loss / 2) return 0;
    fprintf(stderr, "serial: the loss went from %g to %g: it must halve\n", first_loss, loss);
    return 1;
}

/* MIT License: see LICENSE. */
