/* Runs a built model once: ./run WEIGHTS THREADS DTYPE:SIZES:FILE ...
 *
 *   ./run out/weights.bin 2 float32:32x128:x.bin
 *
 * Each input is a file of raw numbers; a number has no sizes (int64::n.bin). The outputs go to output_0.bin, ..., and
 * what they are to the standard output. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

static void stop(const char *text) {
  fprintf(stderr, "run: %s\n", text);
  exit(1);
}

static void check(const char *error) {
  if (error) stop(error);
}

static const struct {
  const char *name;
  int64_t dtype;
} DTYPES[] = {{"float32", AIRGRAPH_FLOAT32}, {"float64", AIRGRAPH_FLOAT64}, {"int64", AIRGRAPH_INT64},
              {"int32", AIRGRAPH_INT32},     {"uint8", AIRGRAPH_UINT8},     {"bool", AIRGRAPH_BOOL}};

/* An input from its description on the command line. */
static airgraph_tensor read_input(char *text) {
  airgraph_tensor t = {0};
  char *sizes = strchr(text, ':'), *path = sizes ? strchr(sizes + 1, ':') : NULL;
  if (!path) stop("an input is DTYPE:SIZES:FILE");
  *sizes++ = *path++ = 0;
  t.dtype = -1;
  for (size_t i = 0; i < sizeof DTYPES / sizeof *DTYPES; i++)
    if (!strcmp(DTYPES[i].name, text)) t.dtype = DTYPES[i].dtype;
  for (char *size = strtok(sizes, "x"); size && t.rank < 8; size = strtok(NULL, "x"))
    t.sizes[t.rank++] = atoll(size);
  FILE *file = fopen(path, "rb");
  if (!file) stop("an input cannot be opened");
  fseek(file, 0, SEEK_END);
  t.bytes = ftell(file);
  rewind(file);
  t.data = malloc(t.bytes ? t.bytes : 1);
  if (!t.data || fread(t.data, 1, t.bytes, file) != (size_t)t.bytes) stop("an input cannot be read");
  fclose(file);
  return t;
}

static void write_output(int number, const airgraph_tensor *t) {
  char path[32];
  snprintf(path, sizeof path, "output_%d.bin", number);
  FILE *file = fopen(path, "wb");
  if (!file || fwrite(t->data, 1, t->bytes, file) != (size_t)t->bytes) stop("an output cannot be written");
  fclose(file);
  printf("%s: dtype %lld, sizes", path, (long long)t->dtype);
  for (int64_t d = 0; d < t->rank; d++) printf(" %lld", (long long)t->sizes[d]);
  printf("\n");
}

int main(int argc, char **argv) {
  if (argc != 3 + MODEL_INPUTS) stop("usage: run WEIGHTS THREADS DTYPE:SIZES:FILE ...");
  model *m;
  check(model_create(argv[1], atoi(argv[2]), &m));

  airgraph_tensor inputs[MODEL_INPUTS + 1], outputs[MODEL_OUTPUTS + 1];
  for (int i = 0; i < MODEL_INPUTS; i++) inputs[i] = read_input(argv[3 + i]);
  int64_t arena_bytes;
  check(model_prepare(m, inputs, outputs, &arena_bytes));
  for (int i = 0; i < MODEL_OUTPUTS; i++) outputs[i].data = malloc(outputs[i].bytes ? outputs[i].bytes : 1);
  void *arena = malloc(arena_bytes);
  check(model_run(m, inputs, outputs, arena, arena_bytes));

  for (int i = 0; i < MODEL_OUTPUTS; i++) write_output(i, &outputs[i]);
  free(arena);
  for (int i = 0; i < MODEL_INPUTS; i++) free(inputs[i].data);
  for (int i = 0; i < MODEL_OUTPUTS; i++) free(outputs[i].data);
  model_destroy(m);
  return 0;
}
