"""Export a classifier for offline inference: a graph file, and its weights inside.

On an Ascend machine ATC turns the file into an offline model:
    atc --model=export_file/export.air --framework=1 --output=offline --soc_version=...
Without one: airgraph run examples/ascend/export_model.py
"""

import tempfile
from pathlib import Path

import torch
import torch_npu
import torchair


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(100, 32)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = torch.nn.Linear(32, 5)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean(dim=1))
        return {"logits": logits, "label": logits.argmax(dim=-1)}


torch.manual_seed(0)
plain = Classifier().eval()
model = Classifier().eval()
model.load_state_dict(plain.state_dict())
model = model.npu()
tokens = torch.randint(0, 100, (4, 12))

with tempfile.TemporaryDirectory() as folder:
    torchair.dynamo_export(tokens.npu(), model=model, export_path=folder, export_name="classifier", dynamic=True)

    written = sorted(file.name for file in Path(folder).iterdir())
    assert written == ["classifier.air", "dynamo.pbtxt"], written
    text = (Path(folder) / "dynamo.pbtxt").read_text()
    assert text.count('op: "Data"') == 1, "the tokens are the only input: weights are constants"
    assert text.count('op: "Const"') >= len(list(model.parameters()))
    assert "MatMul" in text and "LayerNorm" in text

    # The way back is airgraph's own; on an Ascend machine it is ATC and the offline model.
    import airgraph

    offline = airgraph.load_export(Path(folder) / "classifier.air", device="cpu")
    worst = 0.0
    for shape in ((4, 12), (7, 9), (2, 30)):  # exported with dynamic=True: other sizes work, too
        other = torch.randint(0, 100, shape)
        found, expected = offline(other), plain(other)
        torch.testing.assert_close(found["logits"], expected["logits"])
        torch.testing.assert_close(found["label"], expected["label"])
        worst = max(worst, (found["logits"] - expected["logits"]).abs().max().item())
    size = (Path(folder) / "classifier.air").stat().st_size

print(f"classifier.air: {size} bytes, {len(offline.weights)} weights; as plain PyTorch to {worst:.0e} at three sizes")
