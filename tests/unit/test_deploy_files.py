"""The files under deploy/ are what their readers take."""

import subprocess
from pathlib import Path

import yaml
from ray.serve.schema import ServeDeploySchema

from pipelines.online.config import ServeConfig
from pipelines.online.serve import proxy

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_serve_takes_the_file_and_the_endpoint_its_arguments():
    schema = ServeDeploySchema.model_validate(yaml.safe_load((DEPLOY / "serve.yaml").read_text()))
    (application,) = schema.applications
    module, _, name = application.import_path.partition(":")
    assert (module, name) == ("pipelines.online.app", "build")
    assert [model.served_name for model in ServeConfig(**application.args).served] == [
        "smollm2-135m",
        "smollm2-135m-plain",
    ]


def test_rays_nodes_get_what_peagle_serve_gives_its_own():
    script = f"set -a; . {DEPLOY / 'ray.env'}; set +a; env -0"
    done = subprocess.run(["sh", "-c", script], env={}, capture_output=True, text=True, check=True)
    variables = dict(line.split("=", 1) for line in done.stdout.split("\0") if line.startswith("RAY_"))
    assert variables == {"RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0", **proxy.ENVIRONMENT}
