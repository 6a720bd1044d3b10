import contextlib
import json
import subprocess
import sys

WORKER = """
import json, sys, torch
from peagle.drafter.training import ProcessGroup
rank, rendezvous = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
workers = ProcessGroup()
summed = [torch.tensor([1.0 + rank, 2.0]), torch.tensor([[3 * rank]])]
workers.sum_(summed)
parameters = [torch.nn.Parameter(torch.full((2,), float(rank + 1))), torch.nn.Parameter(torch.full((1, 2), 7.0 * rank))]
workers.broadcast_(parameters)
agreed = workers.agree(rank == 1)
workers.barrier()
print(json.dumps([[t.tolist() for t in summed], [t.tolist() for t in parameters], agreed, workers.rank, workers.size]))
torch.distributed.destroy_process_group()
"""


def test_process_group_sums_and_broadcasts(tmp_path):
    commands = [[sys.executable, "-c", WORKER, str(rank), str(tmp_path / "rendezvous")] for rank in range(2)]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) for command in commands
        ]
        for process in processes:
            stack.callback(process.kill)  # if one fails, the other would wait forever
        for rank, process in enumerate(processes):
            stdout, _ = process.communicate(timeout=120)
            assert process.returncode == 0
            assert json.loads(stdout.splitlines()[-1]) == [
                [[3.0, 4.0], [[3]]],
                [[1.0, 1.0], [[0.0, 0.0]]],
                False,
                rank,
                2,
            ]
