/*  implementation_pipeline.c - the bodies of ddp_pipeline.h, the counterpart of implementation.c. */
#define DDP_PIPELINE_IMPLEMENTATION
#include "../../ddp_pipeline.h"
#include "inner.h"

double inner_span(const ddp_pipeline *pipeline, int rank) { return pipeline->run.measures[0].spans[rank]; }
