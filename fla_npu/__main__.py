"""`python -m fla_npu` is the `fla-npu` command."""

from fla_npu.cli.main import main

main(prog_name="fla-npu")
