/*  curve.h - collects a loss curve during training and draws it as an SVG at the end */
#ifndef DDP_EXAMPLE_CURVE_H
#define DDP_EXAMPLE_CURVE_H

#include "../../ddp.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define CURVE_POINTS 500

typedef struct curve {
    double step[CURVE_POINTS], loss[CURVE_POINTS];
    int count;
} curve;

/* Ignores points that are not finite, and those after the first CURVE_POINTS. */
static void curve_add(curve *c, double step, double loss) {
    if (c->count == CURVE_POINTS || !isfinite(loss)) return;
    c->step[c->count] = step;
    c->loss[c->count] = loss;
    c->count++;
}

/* The picture has 900 x 480 pixels. The edges of the plot inside it: */
#define PLOT_LEFT 70.0
#define PLOT_RIGHT 880.0
#define PLOT_TOP 50.0
#define PLOT_BOTTOM 420.0

typedef struct plot {
    FILE *file;
    double x0, x1, y0, y1; /* the values at the edges of the plot */
} plot;

static double plot_x(const plot *p, double x) {
    return PLOT_LEFT + (x - p->x0) / (p->x1 - p->x0) * (PLOT_RIGHT - PLOT_LEFT);
}
static double plot_y(const plot *p, double y) {
    return PLOT_BOTTOM - (y - p->y0) / (p->y1 - p->y0) * (PLOT_BOTTOM - PLOT_TOP);
}

/* The distance between ticks: 1, 2 or 5 times a power of ten, with at most `ticks` steps in the range. */
static double tick_step(double range, int ticks) {
    double power = pow(10, floor(log10(range / ticks)));
    for (int i = 0; i < 3; i++) {
        static const double factors[] = {1, 2, 5};
        if (range / (power * factors[i]) <= ticks) return power * factors[i];
    }
    return power * 10;
}

static void plot_axes(plot *p) {
    double dx = tick_step(p->x1 - p->x0, 10), dy = tick_step(p->y1 - p->y0, 8);
    if (dx < 1) dx = 1;
    for (double x = ceil(p->x0 / dx) * dx; x <= p->x1 + dx / 1e6; x += dx)
        fprintf(p->file,
                "<path d='M%.1f %.1fV%.1f' class='grid'/><text x='%.1f' y='%.1f' "
                "text-anchor='middle'>%.15g</text>\n",
                plot_x(p, x), PLOT_TOP, PLOT_BOTTOM, plot_x(p, x), PLOT_BOTTOM + 20, x);
    for (double y = ceil(p->y0 / dy) * dy; y <= p->y1 + dy / 1e6; y += dy)
        fprintf(
            p->file,
            "<path d='M%.1f %.1fH%.1f' class='grid'/><text x='%.1f' y='%.1f' text-anchor='end'>%.4g</text>\n",
            PLOT_LEFT, plot_y(p, y), PLOT_RIGHT, PLOT_LEFT - 8, plot_y(p, y) + 4, y);
    fprintf(p->file, "<path d='M%.1f %.1fV%.1fH%.1f' class='axis'/>\n", PLOT_LEFT, PLOT_TOP, PLOT_BOTTOM,
            PLOT_RIGHT);
    fprintf(p->file, "<text x='%.1f' y='%.1f' text-anchor='middle'>step</text>\n",
            (PLOT_LEFT + PLOT_RIGHT) / 2, PLOT_BOTTOM + 44);
    fprintf(
        p->file,
        "<text transform='translate(20 %.1f) rotate(-90)' text-anchor='middle'>loss, nats per token</text>\n",
        (PLOT_TOP + PLOT_BOTTOM) / 2);
}

static void plot_curve(plot *p, const curve *c, const char *color, int dots) {
    if (c->count == 0) return;
    fprintf(p->file, "<path class='curve' stroke='%s' d='", color);
    for (int i = 0; i < c->count; i++)
        fprintf(p->file, "%c%.1f %.1f", i ? 'L' : 'M', plot_x(p, c->step[i]), plot_y(p, c->loss[i]));
    fprintf(p->file, "'/>\n");
    for (int i = 0; dots && i < c->count; i++)
        fprintf(p->file, "<circle cx='%.1f' cy='%.1f' r='3.5' fill='%s'/>\n", plot_x(p, c->step[i]),
                plot_y(p, c->loss[i]), color);
}

static void plot_legend(plot *p, int row, const char *style, const char *label) {
    double y = PLOT_TOP + 20 + 20 * row;
    fprintf(p->file, "<path class='curve' %s d='M%.1f %.1fh30'/><text x='%.1f' y='%.1f'>%s</text>\n", style,
            PLOT_RIGHT - 260, y, PLOT_RIGHT - 222, y + 4, label);
}

/* Draws the training loss and the validation loss over the steps from first to last, and the unigram entropy
   as a dashed line. Writes a temporary file, which then replaces the one at path. */
static ddp_result curve_draw(const char *path, const char *title, double first, double last,
                             const curve *training, const curve *validation, double entropy) {
    char label[96], temporary[4096];
    plot p;
    const curve *curves[2];
    double low = entropy, high = entropy;
    curves[0] = training;
    curves[1] = validation;
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < curves[k]->count; i++) {
            low = curves[k]->loss[i] < low ? curves[k]->loss[i] : low;
            high = curves[k]->loss[i] > high ? curves[k]->loss[i] : high;
        }
    p.x0 = first;
    p.x1 = last > first ? last : first + 1;
    p.y0 = floor(low * 2 - 0.2) / 2;
    p.y1 = ceil(high * 2 + 0.2) / 2;
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    p.file = fopen(temporary, "w");
    if (!p.file) return ddp_fail(DDP_ERR_SYSTEM, "%s cannot be written: %s", path, strerror(errno));
    fprintf(
        p.file,
        "<svg xmlns='http://www.w3.org/2000/svg' width='900' height='480' viewBox='0 0 900 480' "
        "font-family='sans-serif' "
        "font-size='13'>\n"
        "<style>.grid{stroke:#ddd}.axis{stroke:#333;fill:none}.curve{fill:none;stroke-width:1.6}</style>\n"
        "<rect width='900' height='480' fill='white'/>\n"
        "<text x='%.1f' y='28' font-size='16'>%s</text>\n",
        PLOT_LEFT, title);
    plot_axes(&p);
    fprintf(p.file, "<path class='curve' stroke='#888' stroke-dasharray='6 4' d='M%.1f %.1fH%.1f'/>\n",
            PLOT_LEFT, plot_y(&p, entropy), PLOT_RIGHT);
    plot_curve(&p, training, "#4c78a8", 0);
    plot_curve(&p, validation, "#d1495b", 1);
    plot_legend(&p, 0, "stroke='#4c78a8'", "training");
    snprintf(label, sizeof label, "validation, at the end %.3f",
             validation->count ? validation->loss[validation->count - 1] : 0.0);
    plot_legend(&p, 1, "stroke='#d1495b'", label);
    snprintf(label, sizeof label, "unigram entropy %.3f", entropy);
    plot_legend(&p, 2, "stroke='#888' stroke-dasharray='6 4'", label);
    fprintf(p.file, "</svg>\n");
    if (fclose(p.file) != 0 || rename(temporary, path) != 0)
        return ddp_fail(DDP_ERR_SYSTEM, "%s cannot be written: %s", path, strerror(errno));
    return DDP_OK;
}

#endif /* DDP_EXAMPLE_CURVE_H */

/* MIT License: see LICENSE. */
