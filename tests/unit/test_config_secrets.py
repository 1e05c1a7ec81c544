from __future__ import annotations

import pytest

from swiftcp.config.secrets import mask


@pytest.mark.parametrize(
    "text",
    [
        "https://user:SECRET@host/path",
        "https://host/file?token=SECRET&x=1",
        "HF_TOKEN=SECRET",
        "--hub_token SECRET",
        "--api-key=SECRET",
        "wandb_api_key: 'SECRET'",
        "hf_SECRETSECRETSECRETSECRETSECRET0",
        "password=SECRET",
        "SLURM_JWT=SECRET",
        "eyJSECRETSECRET.SECRET.SECRET",
    ],
)
def test_secrets_are_masked(text):
    assert "SECRET" not in mask(text)
    assert "***" in mask(text)


@pytest.mark.parametrize(
    "text", ["--image_max_token_num=1024", "/data/hf_checkpoints_of_qwen3_vl", "max_length 4096", "sk-learn-digits-as-images", "a: b"]
)
def test_plain_text_stays(text):
    assert mask(text) == text
