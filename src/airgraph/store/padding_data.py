"""Which sizes of a program are padded, and to what, as plain data: what the analysis of its graph found out.

padding_data(dimensions, buckets, writer)         {"buckets": {"batch": [1, 2, 4]}, "dimensions": [...]}
read_padding(data, reader)                        (dimensions, buckets) again
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airgraph.analysis.padding.proof import Padding
from airgraph.ir.exact import DataReader, DataWriter
from airgraph.runtime.buckets import Buckets, Dimension


def padding_data(dimensions: Sequence[Dimension], buckets: Buckets, writer: DataWriter) -> dict[str, Any]:
    return {"buckets": bucket_data(buckets), "dimensions": [dimension_data(d, writer) for d in dimensions]}


def bucket_data(buckets: Buckets) -> dict[str, Any]:
    return {name: sizes if isinstance(sizes, str) else list(sizes) for name, sizes in buckets.sizes.items()}


def dimension_data(dimension: Dimension, writer: DataWriter) -> dict[str, Any]:
    found = dimension.padding
    return {
        "name": dimension.name,
        "symbol": writer.data(found.symbol),
        "inputs": writer.data(dict(found.inputs)),
        "masks": writer.data(dict(found.masks)),
        "outputs": writer.data([dict(axes) for axes in found.outputs]),
        "ordered": found.ordered,
    }


def read_padding(data: Mapping[str, Any], reader: DataReader) -> tuple[list[Dimension], Buckets]:
    return [read_dimension(d, reader) for d in data["dimensions"]], Buckets.make(data["buckets"])


def read_dimension(data: Mapping[str, Any], reader: DataReader) -> Dimension:
    symbol, inputs, masks, outputs = (reader.value(data[key]) for key in ("symbol", "inputs", "masks", "outputs"))
    return Dimension(data["name"], Padding(symbol, inputs, masks, tuple(outputs), data["ordered"]))
