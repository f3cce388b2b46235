/*  serial.c - a trainer on one core, as you may have one: port.md makes it parallel in three steps

        cc -O3 -march=native examples/serial.c -o serial -lm
        ./serial

    The model has LAYERS residual layers h + relu(h W). It learns y[j] = x[j] + max(x[j + 1], 0). Parameters,
    gradients and momentum are flat arrays. A step adds the gradients of BATCH / MICRO micro-batches. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { WIDTH = 64, LAYERS = 8, LAYER = WIDTH * WIDTH, PARAMS = LAYERS * LAYER };
enum { MICRO = 8, BATCH = 32, STEPS = 60 };
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
        float z[WIDTH] = {0};
        for (int i = 0; i < WIDTH; i++)
            for (int j = 0; j < WIDTH; j++) z[j] += h[l][b][i] * w[i * WIDTH + j];
        for (int j = 0; j < WIDTH; j++) h[l + 1][b][j] = h[l][b][j] + fmaxf(z[j], 0);
    }
}

/* Adds to the gradient of layer l. */
static void backward(int l) {
    const float *w = param + l * LAYER;
    float *dw = grad + l * LAYER, dz[WIDTH];
    for (int b = 0; b < MICRO; b++) {
        for (int j = 0; j < WIDTH; j++) dz[j] = h[l + 1][b][j] > h[l][b][j] ? dh[b][j] : 0;
        for (int i = 0; i < WIDTH; i++) {
            for (int j = 0; j < WIDTH; j++) dw[i * WIDTH + j] += h[l][b][i] * dz[j];
            for (int j = 0; j < WIDTH; j++) dh[b][i] += w[i * WIDTH + j] * dz[j];
        }
    }
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

int main(void) {
    double loss = 0;
    float *x = h[0][0];
    for (int i = 0; i < PARAMS; i++) param[i] = uniform((uint32_t)i) / WIDTH;
    for (int step = 0; step < STEPS; step++) {
        loss = 0;
        memset(grad, 0, sizeof grad);
        for (int m = 0; m < BATCH / MICRO; m++) {
            int first = (step * BATCH + m * MICRO) * WIDTH;
            for (int i = 0; i < MICRO * WIDTH; i++) x[i] = uniform((uint32_t)(first + i));
            for (int l = 0; l < LAYERS; l++) forward(l);
            loss += compute_loss();
            for (int l = LAYERS - 1; l >= 0; l--) backward(l);
        }
        for (int i = 0; i < PARAMS; i++) {
            momentum[i] = 0.9f * momentum[i] + grad[i];
            param[i] -= 0.01f * momentum[i];
        }
        if (step % 20 == 0 || step == STEPS - 1) printf("step %2d   loss %.12f\n", step, loss);
    }
    return loss < 0.1 ? 0 : 1;
}

/* MIT License: see LICENSE. */
