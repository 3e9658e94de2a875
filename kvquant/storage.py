"""Caches in files. A file is safetensors, does not depend on the kernels that filled it, and is read without pickle.

Its metadata entry "kvquant" holds, with spaces between, the format's version, a checksum and a description (JSON). The
tensors of layer i are named "layers.i.*"; what they are, and what is said of a layer, is in stored.py.
"""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from kvquant import compat
from kvquant.cache import QuantCache
from kvquant.description import Stored, config_of, field, plain_config
from kvquant.stored import refuse_rest, restore, store, title

VERSION = "1"  # of the format, of which the records of PlainLayout are a part
_ENTRY = "kvquant"


def save(cache: QuantCache, path: str | os.PathLike[str]) -> None:
    """Writes a cache to a file. Raises NotImplementedError, before writing anything, for what no file can hold."""
    layers = [_stored(i, layer) for i, layer in enumerate(cache.layers)]
    tensors = {f"layers.{i}.{name}": tensor for i, layer in enumerate(layers) for name, tensor in layer.tensors.items()}
    text = json.dumps({"quant": plain_config(cache.quant), "layers": [layer.plain for layer in layers]})
    _write(Path(path), tensors, {_ENTRY: f"{VERSION} {_checksum(text, tensors)} {text}"})


def load(
    path: str | os.PathLike[str], config: PreTrainedConfig | None, device: torch.device | str | None
) -> QuantCache:
    """The cache in a file. Raises ValueError, naming the file, for one that is damaged or does not fit `config`."""
    target = torch.device("cpu" if device is None else device)
    try:
        # Outside inference mode, since tensors made inside it could not be written to by a later call outside.
        with torch.inference_mode(False):
            description, tensors = _read(path)
            cache = QuantCache(quant=config_of(description), config=config)
            layers = _restored(description, tensors, target)
    except SafetensorError as error:
        raise ValueError(f"{os.fspath(path)} cannot be loaded: it is no whole safetensors file: {error}") from error
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} cannot be loaded: {error}") from error
    difference = None if config is None else _difference(layers, cache.layers, config)
    if difference is not None:
        raise ValueError(f"{os.fspath(path)} does not fit config: {difference}")
    cache.layers = layers
    return cache


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    temporary = path.with_name(f".kvquant-{uuid4().hex}.tmp")
    try:
        temporary.touch(exist_ok=False)  # with the permissions of any new file, which safetensors would narrow
        permissions = temporary.stat().st_mode
        save_file(tensors, temporary, metadata)
        temporary.chmod(permissions)
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())  # before it gets its name, which after a crash must not stand for less
        temporary.replace(path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: str | os.PathLike[str]) -> tuple[Any, dict[str, Tensor]]:
    """Description and tensors of a file, as they were written."""
    with safe_open(path, framework="pt") as file:
        version, _, rest = (file.metadata() or {}).get(_ENTRY, "").partition(" ")
        if not version:
            raise ValueError("it is a safetensors file of something else than a QuantCache")
        if version != VERSION:
            raise ValueError(f"it has format version {version}, and this version of kvquant reads {VERSION}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    checksum, _, text = rest.partition(" ")
    if checksum != _checksum(text, tensors):
        raise ValueError("it is damaged: its checksum does not match its content")
    try:
        return json.loads(text), tensors
    except RecursionError:
        raise ValueError("its description is nested too deeply") from None


def _checksum(text: str, tensors: dict[str, Tensor]) -> str:
    """Of a description, and of the names, dtypes, shapes and bytes of tensors."""
    digest = sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _difference(found: list[Any], expected: list[Any], config: PreTrainedConfig) -> str | None:
    """What keeps layers from being those of a model. Heads are compared where a configuration states them by layer."""
    if len(found) != len(expected):
        return f"it holds {len(found)} layers, and config has {len(expected)}"
    for i, (layer, other) in enumerate(zip(found, expected, strict=True)):
        if title(layer) != title(other):
            return f"layer {i} is a {title(layer)} in the file, and a {title(other)} by config"
    for i, (layer, stated) in enumerate(zip(found, compat.stated_shapes(config), strict=False)):
        shape = None if layer.keys is None else layer.keys.shape
        held = {"num_key_value_heads": shape[1], "head_dim": shape[3]} if shape else stated
        for name, size in stated.items():
            if held[name] != size:
                return f"layer {i} has {name}={held[name]} in the file, and {name}={size} by config"
    return None


def _stored(index: int, layer: Any) -> Stored:
    try:
        return store(layer)
    except NotImplementedError as error:
        raise NotImplementedError(f"layer {index} cannot be saved: {error}") from error


def _restored(description: Any, tensors: dict[str, Tensor], device: torch.device) -> list[Any]:
    """The layers of a file. Takes their tensors out of `tensors`, of which none may be left."""
    layers = []
    for i, plain in enumerate(field(description, "layers", list)):
        prefix = f"layers.{i}."
        own = [name for name in tensors if name.startswith(prefix)]
        stored = Stored(plain, {name.removeprefix(prefix): tensors.pop(name) for name in own})
        try:
            layers.append(restore(stored, device))
        except ValueError as error:
            raise ValueError(f"layer {i}: {error}") from error
    refuse_rest(tensors)
    return layers
