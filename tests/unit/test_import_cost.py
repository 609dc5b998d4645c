# SPDX-License-Identifier: Apache-2.0
"""What a process pays for bagua before it trains: no module of torch that it would not have loaded with Gloo."""

import json
import subprocess
import sys

import pytest

_SCRIPT = """
import json, sys
import torch
{imports}
import torch.distributed as dist
dist.init_process_group("{backend}", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
dist.barrier()
print(json.dumps(list(sys.modules)))
"""


def _modules(backend: str, imports: str = "") -> set[str]:
    """Those that a fresh process has loaded after its first operation."""
    script = _SCRIPT.format(backend=backend, imports=imports)
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    return set(json.loads(output.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def with_gloo() -> set[str]:
    return _modules("gloo")


# As a user has it: with and without the import, and with the original's interface.
@pytest.mark.parametrize("imports", ["", "import bagua", "import bagua.torch_api"])
def test_the_first_operation_loads_no_more_of_torch_than_with_gloo(with_gloo: set[str], imports: str) -> None:
    modules = _modules("bagua", imports or "import bagua_autoload; bagua_autoload.register()")
    assert "bagua._C" in modules
    # Seconds, where all else that is imported takes milliseconds.
    assert "torch._dynamo" not in modules
    assert {name for name in modules - with_gloo if name.split(".")[0] == "torch"} == set()
