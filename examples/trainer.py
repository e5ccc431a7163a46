"""`transformers.Trainer` with a model compiled by airgraph (needs `pip install accelerate`).

`TrainingArguments(torch_compile_backend=...)` takes only the backends that accelerate lists, so the model is compiled in
place by `nn.Module.compile`, before the Trainer gets it.
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from airgraph.journal import TOTALS

torch.manual_seed(0)
config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
model = BertForSequenceClassification(config)
model.compile(backend="airgraph")
tokens = torch.randint(0, 64, (16, 12))
data = [{"input_ids": row, "labels": (row.sum() % 2)} for row in tokens]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=8,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    result = Trainer(model=model, args=arguments, train_dataset=data).train()
assert result.global_step == 3 and result.training_loss > 0
assert TOTALS["graphs"] >= 2, "a forward and a backward graph"
print(f"trained 3 steps, loss {result.training_loss:.3f}")
