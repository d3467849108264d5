"""Default sizes of each model type, for configurations that leave them out.

Source: the configuration classes of transformers 5.24; a test compares this table with them. A dash
means that the type has no default, or that the size follows from other sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

_FIELDS = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "head_dim",
    "sliding_window",
    "max_position_embeddings",
)
_TABLE = """
apertus               32   32    -  4096    -     -   65536
apertus1p5_text       32   32    -  4096    -     -   65536
arcee                 32   32    -  2560    -     -    4096
aria_text             32   32    -  4096    -     -    2048
bart                  12   16    -  1024    -     -    1024
bert                  12   12    -   768    -     -     512
bert-generation       24   16    -  1024    -     -     512
bigbird_pegasus       16   16    -  1024    -     -    4096
biogpt                24   16    -  1024    -     -    1024
bitnet                30   20    5  2560    -     -    2048
blenderbot            24   32    -  2560    -     -     128
blenderbot-small       8   16    -   512    -     -     512
camembert             12   12    -   768    -     -     512
codegen               28   16    -  4096    -     -    2048
cohere                40   64    -  8192    -     -    8192
cohere2               40   64    -  8192    -  4096    8192
ctrl                  48   16    -  1280    -     -     256
cwm                   64   48    8  6144  128  8192  131072
data2vec-text         12   12    -   768    -     -     512
deepseek_v2           32   32    -  4096    -     -    2048
deepseek_v3           61  128  128  7168    -     -    4096
deepseek_v32          61  128  128  7168   64     -  163840
dots1                 62   32   32  4608    -  4096    2048
electra               12    4    -   256    -     -     512
emu3_text_model       32   32    8  4096    -     -    9216
ernie                 12   12    -   768    -     -     512
ernie4_5              18   16    2  1024  128     -  131072
ernie4_5_moe          28   20    4  2560    -     -  131072
exaone                32   32    8  4096    -     -    4096
exaone4               32   32   32  4096    -  4096    2048
falcon                32   71    -  4544    -     -    2048
flex_olmo             32   32    -  4096    -     -    4096
gemma                 28   16   16  3072  256     -    8192
gemma2                26    8    4  2304  256  4096    8192
gemma3_text           26    8    4  2304  256  4096  131072
glm                   40   32    2  4096  128     -  131072
glm4                  40   32    2  4096  128     -  131072
glm4_moe              46   96    8  4096    -     -  131072
glm_moe_dsa           78   64   64  6144   64     -  202752
gpt2                  12   12    -   768    -     -    1024
gpt_bigcode           12   12    -   768    -     -    1024
gpt_neox              44   64    -  6144    -     -    2048
gpt_oss               36   64    8  2880   64   128  131072
gptj                  28   16    -  4096    -     -    2048
granite               32   32    -  4096    -     -    2048
granitemoe            32   32    -  4096    -     -    2048
granitemoeshared      32   32    -  4096    -     -    2048
helium                24   20   20  2560  128     -    4096
hunyuan_v1_dense      32   32    -  4096    -     -    2048
hunyuan_v1_moe        32   32    -  4096    -     -    2048
hy_v3                 80   64    8  4096  128     -  131072
hyperclovax           32   32    -  4096    -     -    2048
internlm3             48   32    2  4096  128     -   32768
iquestcoder           80   40    8  5120  128     -  131072
jais2                 32   26    -  3328    -     -    8192
jetmoe                12    -   16  2048  128     -    4096
kimi_k2               61  128  128  7168    -     -    4096
llama                 32   32    -  4096    -     -    2048
marian                12   16    -  1024    -     -    1024
mbart                 12   16    -  1024    -     -    1024
minimax_m2            62   48    8  3072  128     -  196608
ministral3            34   32    8  4096  128     -  262144
mistral               32   32    8  4096    -  4096  131072
mixtral               32   32    8  4096    -     -  131072
nanochat              12    6    -   768    -     -    2048
nemotron              32   48    -  6144    -     -    4096
olmo                  32   32    -  4096    -     -    2048
olmo2                 32   32    -  4096    -     -    2048
olmo3                 32   32    -  4096    -  4096    2048
olmoe                 16   16    -  2048    -     -    4096
opt                   12   12    -   768    -     -    2048
pegasus               12   16    -  1024    -     -    1024
persimmon             36   64    -  4096    -     -   16384
phi                   24   32    -  2048    -     -    2048
phi3                  32   32    -  3072    -     -    4096
phi4_multimodal       32   32    8  3072    -     -  131072
phimoe                32   32    8  4096    -     -  131072
plbart                 6   12    -   768    -     -    1024
qwen2                 32   32   32  4096    -  4096   32768
qwen2_5_vl            80   64    8  8192    -  4096   32768
qwen2_5_vl_text       80   64    8  8192    -  4096   32768
qwen2_moe             24   16   16  2048    -  4096   32768
qwen2_vl              80   64    8  8192    -  4096   32768
qwen2_vl_text         80   64    8  8192    -  4096   32768
qwen3                 32   32   32  4096  128  4096   32768
qwen3_5_moe_text      40   16    2  2048  256     -   32768
qwen3_5_text          32   16    4  4096  256     -   32768
qwen3_moe             24   32    4  2048    -  4096   32768
qwen3_next            48   16    2  2048  256     -   32768
qwen3_vl_moe_text     24   16   16  2048    -     -  128000
qwen3_vl_text         32   32   32  4096  128     -  128000
roberta               12   12    -   768    -     -     512
roberta-prelayernorm  12   12    -   768    -     -     512
roc_bert              12   12    -   768    -     -     512
sarvam_moe            19   64    4  4096   64     -  131072
seed_oss              64   80    8  4096  128     -  524288
smollm3               36   16    4  2048    -     -   32768
solar_open            48   64    8  4096  128     -  131072
stablelm              32   32   32  2560    -     -    4096
starcoder2            30   24    2  3072    -     -    4096
xlm-roberta           12   12    -   768    -     -     512
xlm-roberta-xl        36   32    -  2560    -     -     514
xmod                  12   12    -   768    -     -     512
"""


def _read_table() -> dict[str, dict[str, int]]:
    rows = [line.split() for line in _TABLE.strip().splitlines()]
    return {
        name: {field: int(size) for field, size in zip(_FIELDS, sizes, strict=True) if size != "-"}
        for name, *sizes in rows
    }


DEFAULT_SIZES: Mapping[str, Mapping[str, int]] = _read_table()
"""The sizes by model type and by the field's usual name."""
