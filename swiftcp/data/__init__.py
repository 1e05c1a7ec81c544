"""From files of rows to micro-batches; knows neither models nor megatron."""
