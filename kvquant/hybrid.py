"""What models with other states than keys and values ask of a cache, and what they need it to be made with."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache


class HybridCache(DynamicCache):
    """A DynamicCache that says so if a model looks for states that it has no layers for.

    Without a configuration DynamicCache takes every layer to be full attention, and fails on linear-attention and
    indexer states by an IndexError from its list of layers. Each of these methods is the first that some model calls in
    some version from 5.5 on. They raise ValueError if the cache was made without a configuration.
    """

    def has_previous_state(self, *args: Any, **kwargs: Any) -> Any:
        self._need_config("has_previous_state")
        return super().has_previous_state(*args, **kwargs)

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        self._need_config("get_conv_state")
        return super().get_conv_state(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        self._need_config("update_conv_state")
        return super().update_conv_state(*args, **kwargs)

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        self._need_config("get_recurrent_state")
        return super().get_recurrent_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        self._need_config("update_recurrent_state")
        return super().update_recurrent_state(*args, **kwargs)

    def update_indexer(self, *args: Any, **kwargs: Any) -> Any:
        self._need_config("update_indexer")
        return super().update_indexer(*args, **kwargs)

    def _need_config(self, method: str) -> None:
        if self.layer_class_to_replicate is not None:
            raise ValueError(
                f"{method}(): this model keeps other states than keys and values, for which a cache made without its "
                "configuration has no layers; pass config=model.config"
            )
