// Greedy decoding with a Llama that keeps its cache in the instance: ./generate WEIGHTS THREADS TOKEN COUNT
//
//   ./generate out/weights.bin 2 1 16
//
// The model takes a token and its position, gives the logits of the next token, and writes keys and values to its own
// buffers. A second instance would have a cache of its own and share the mapped weights.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <vector>

#include "model.h"

namespace {

void check(const char *error) {
  if (error) throw std::runtime_error(error);
}

struct Destroy {
  void operator()(model *m) const { model_destroy(m); }
};

class Decoder {
 public:
  Decoder(const char *weights, int threads) {
    model *made = nullptr;
    check(model_create(weights, threads, &made));
    model_.reset(made);
  }

  // The token after this one, which is at this position.
  int64_t next(int64_t token, int64_t position) {
    airgraph_tensor inputs[MODEL_INPUTS] = {{&token, sizeof token, AIRGRAPH_INT64, 2, {1, 1}},
                                            {&position, sizeof position, AIRGRAPH_INT64, 1, {1}}};
    airgraph_tensor outputs[MODEL_OUTPUTS] = {};
    check(model_prepare(model_.get(), inputs, outputs, nullptr));
    logits_.resize(outputs[0].bytes / sizeof(float));
    outputs[0].data = logits_.data();
    check(model_run(model_.get(), inputs, outputs, nullptr, 0));
    return std::max_element(logits_.begin(), logits_.end()) - logits_.begin();
  }

 private:
  std::unique_ptr<model, Destroy> model_;
  std::vector<float> logits_;
};

}  // namespace

int main(int argc, char **argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: generate WEIGHTS THREADS TOKEN COUNT\n");
    return 2;
  }
  try {
    Decoder decoder(argv[1], std::atoi(argv[2]));
    int64_t token = std::atoll(argv[3]);
    for (int64_t position = 0; position < std::atoll(argv[4]); position++) {
      token = decoder.next(token, position);
      std::printf("%lld\n", static_cast<long long>(token));
    }
  } catch (const std::exception &error) {
    std::fprintf(stderr, "generate: %s\n", error.what());
    return 1;
  }
  return 0;
}
