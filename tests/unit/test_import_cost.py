# SPDX-License-Identifier: Apache-2.0
"""What a process pays for bagua before it trains: no module of torch that it would not have loaded with Gloo."""

import json
from pathlib import Path

from script_ranks import run_script

# As a user has it: with and without the import, and with the original's interface.
IMPORTS = ["import bagua_autoload; bagua_autoload.register()", "import bagua", "import bagua.torch_api"]
_SCRIPT = """
import json, os, sys
import torch
imports = ["", *IMPORTS][int(os.environ["RANK"])]
exec(imports)
import torch.distributed as dist
dist.init_process_group("bagua" if imports else "gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
dist.barrier()
print(json.dumps(list(sys.modules)))
"""


def test_the_first_operation_loads_no_more_of_torch_than_with_gloo(tmp_path: Path) -> None:
    ends = run_script(_SCRIPT.replace("IMPORTS", repr(IMPORTS)), 1 + len(IMPORTS), tmp_path, fresh=["torch"])
    with_gloo, *others = (set(json.loads(end.output.splitlines()[-1])) for end in ends)
    for imports, modules in zip(IMPORTS, others, strict=True):
        assert "bagua._C" in modules
        # Seconds, where all else that is imported takes milliseconds.
        assert "torch._dynamo" not in modules
        assert {name for name in modules - with_gloo if name.split(".")[0] == "torch"} == set(), imports
