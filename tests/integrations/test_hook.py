"""`fla_npu.enable()`: names answered, modules imported meanwhile, threads, and that nothing is left behind."""

import importlib.resources
import inspect
import pickle
import pkgutil
import runpy
import subprocess
import sys
import threading
import types

import pytest
import torch
from transformers import AutoModelForCausalLM

import fla_npu
import fla_npu.layers
import fla_npu.models
from fla_npu.integrations import hook, layers, transformers
from tests.e2e.models import build, modeling, text_config

PATHS = [
    *(
        "ops",
        "ops.kda",
        "ops.kda.chunk",
        "ops.kda.gate",
        "ops.gated_delta_rule.fused_recurrent",
        "layers",
        "layers.utils",
    ),
    *("modules", "modules.l2norm", "modules.conv.causal_conv1d", "models.utils", "utils", "backends"),
    *("ops.delta_rule.chunk", "ops.gla", "ops.simple_gla.parallel", "ops.retention.naive", "layers.delta_net"),
    *("layers.gla", "layers.simple_gla", "layers.multiscale_retention", "models.gated_deltaproduct"),
    *("models.delta_net", "models.gla", "models.retnet.modeling_retnet"),
    *("layers.mamba2", "models.mamba2.configuration_mamba2"),
]
MODELING = "transformers.models.qwen3_next.modeling_qwen3_next"


@pytest.fixture
def no_fla():
    """The state of an environment without FLA and causal_conv1d, whatever is installed here."""
    if any(map(hook.installed_elsewhere, ("fla", "causal_conv1d"))):
        pytest.skip("fla or causal_conv1d is installed: tests/integrations/test_fla_backend.py is for that")


def imported(prefix: str) -> set[str]:
    return {name for name in sys.modules if name == prefix or name.startswith(f"{prefix}.")}


@pytest.fixture
def forgotten_modeling_module():
    """A modeling module that is not imported, as at the start of a program."""
    import transformers

    before = sys.modules.pop(MODELING, None)
    package = transformers.models.qwen3_next
    vars(package).pop("modeling_qwen3_next", None)
    yield MODELING
    sys.modules.pop(MODELING, None)
    if before is not None:
        sys.modules[MODELING] = package.modeling_qwen3_next = before


@pytest.fixture
def module_to_reload():
    """A modeling module that gets back its classes, and so does its package, which keeps those that were asked for."""
    module = modeling("qwen3_5")
    before = [(one, dict(vars(one))) for one in (module, sys.modules["transformers.models.qwen3_5"])]
    yield module
    fla_npu.disable()
    for one, attributes in before:
        vars(one).clear()
        vars(one).update(attributes)


@pytest.mark.usefixtures("no_fla")
class TestNames:
    def test_every_module_of_fla_is_the_one_of_fla_npu(self):
        with fla_npu.enabled():
            for path in PATHS:
                module = importlib.import_module(f"fla.{path}")
                assert module is sys.modules[f"fla_npu.{path}"]
                assert module.__name__ == module.__spec__.name == f"fla_npu.{path}"
            for name in imported("fla") - {"fla"}:
                assert sys.modules[name] is sys.modules[f"fla_npu.{name.removeprefix('fla.')}"], name

    def test_importing_leaves_the_packages_as_they_were(self):
        conv = importlib.import_module("fla_npu.modules.conv")
        function, spec = conv.causal_conv1d, conv.__spec__
        with fla_npu.enabled():
            importlib.import_module("fla.modules.conv.causal_conv1d")
            importlib.import_module("fla.modules.conv.short_conv")
            assert conv.causal_conv1d is function and callable(function)
            assert conv.__spec__ is spec

    def test_the_name_has_fla_s_version_and_finds_as_a_package(self):
        from transformers.utils.import_utils import _is_package_available

        with fla_npu.enabled():
            import fla

            assert fla.__version__ == "0.6.0"
            assert fla.chunk_kda is fla_npu.chunk_kda
            assert fla.layers.GatedDeltaNet is importlib.import_module("fla_npu.layers").GatedDeltaNet
            assert importlib.util.find_spec("fla").submodule_search_locations == fla_npu.__path__
            available = _is_package_available("fla")
            assert available[0] if isinstance(available, tuple) else available

    def test_tools_find_their_way(self, monkeypatch):
        """`import *`, `pkgutil`, `runpy`, resources, sources and pickles."""
        with fla_npu.enabled():
            import fla.layers

            for module in ("fla", "fla.ops"):
                names: dict = {}
                exec(f"from {module} import *", names)
                expected = set(importlib.import_module("fla_npu.ops").__all__)
                if module == "fla":
                    exported = fla_npu.layers.__all__ + fla_npu.models.__all__
                    expected = {name for name in exported if not name.endswith("Config")}
                assert names.keys() - {"__builtins__"} == expected
            below = {module.name for module in pkgutil.iter_modules(fla.__path__, "fla.")}
            assert {"fla.ops", "fla.layers", "fla.modules", "fla.models", "fla.utils"} <= below
            walked = {module.name for module in pkgutil.walk_packages(fla.ops.__path__, "fla.ops.")}
            assert {"fla.ops.kda", "fla.ops.kda.chunk"} <= walked
            for package in ("fla", "fla_npu"):  # Python runs no module that is loaded already
                monkeypatch.delitem(sys.modules, f"{package}.assets.stdlib_text", raising=False)
            assert runpy.run_module("fla.assets.stdlib_text")["__name__"] == "fla.assets.stdlib_text"
            typed = importlib.resources.files("fla") / "py.typed"
            assert typed.is_file() and importlib.resources.files("fla.ops").joinpath("checks.py").is_file()
            assert "def chunk_kda(" in inspect.getsource(importlib.import_module("fla.ops.kda.chunk"))
            # What FLA has pickled is found here; what is pickled here needs no `fla`.
            assert pickle.loads(b"cfla.layers.gated_deltanet\nGatedDeltaNet\n.") is fla.layers.GatedDeltaNet
            written = pickle.dumps(fla.layers.GatedDeltaNet)
        assert pickle.loads(written) is fla_npu.layers.GatedDeltaNet

    def test_a_name_that_is_blocked_stays_so(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "fla", None)
        with fla_npu.enabled() as report:
            assert "fla" not in report.routes and "None in sys.modules" in report.skipped["fla"]
            for name in ("fla", "fla.ops"):
                with pytest.raises(ModuleNotFoundError, match="fla"):
                    importlib.import_module(name)
            with hook._active.imports._installed.hidden():
                pass
        assert sys.modules["fla"] is None

    def test_what_is_missing_stays_missing(self):
        with fla_npu.enabled():
            with pytest.raises(ModuleNotFoundError, match=r"No module named 'fla.nothing'"):
                importlib.import_module("fla.nothing")
            with pytest.raises(ModuleNotFoundError, match=r"fla.ops.nothing"):
                importlib.import_module("fla.ops.nothing")
            import fla

            with pytest.raises(AttributeError, match="nothing"):
                fla.nothing  # noqa: B018

    def test_nothing_is_left_behind(self):
        path, modules = list(sys.meta_path), imported("fla") | imported("causal_conv1d")
        assert not modules
        fla_npu.enable()
        for name in ("causal_conv1d", "fla.ops.kda.chunk"):
            importlib.import_module(name)
        assert imported("fla") and imported("causal_conv1d")
        fla_npu.disable()
        assert sys.meta_path == path
        assert not imported("fla") | imported("causal_conv1d")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("fla")
        assert fla_npu.ops.kda.chunk is sys.modules["fla_npu.ops.kda.chunk"]

    def test_a_real_package_wins(self, tmp_path, monkeypatch):
        (tmp_path / "fla").mkdir()
        (tmp_path / "fla" / "__init__.py").write_text("__version__ = '9'\nimport causal_conv1d\n")
        (tmp_path / "fla" / "ops.py").write_text("mine = True\n")
        with fla_npu.enabled():
            # Found after enabling: the finder asks again at every import.
            monkeypatch.syspath_prepend(tmp_path)
            import fla.ops

            assert fla.__version__ == "9" and fla.ops.mine
            assert imported("fla") == {"fla", "fla.ops"}
        assert imported("fla") == {"fla", "fla.ops"}
        del sys.modules["fla"], sys.modules["fla.ops"]

    @pytest.mark.parametrize("imported_before", [False, True])
    def test_a_folder_without_modules_is_no_package(self, tmp_path, monkeypatch, imported_before):
        """A folder of data, or what an uninstalled package has left: Python takes it for a namespace package."""
        for name in ("fla", "causal_conv1d"):
            (tmp_path / name / "ops" / "__pycache__").mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path)
        folders = {name: importlib.import_module(name) for name in ("fla", "fla.ops") if imported_before}
        report = fla_npu.enable()
        assert {"fla", "causal_conv1d"} <= set(report.routes)
        assert importlib.import_module("fla.ops.kda") is fla_npu.ops.kda
        with hook._active.imports._installed.hidden():
            # As a modeling module does.
            assert not hasattr(importlib.import_module("fla"), "__version__")
        assert importlib.import_module("fla").__version__ and importlib.import_module("causal_conv1d").__version__
        fla_npu.disable()
        assert {name: sys.modules[name] for name in folders} == folders
        assert not hasattr(importlib.import_module("fla"), "__version__")
        for name in imported("fla") | imported("causal_conv1d"):
            del sys.modules[name]

    def test_a_folder_with_modules_is_one(self, tmp_path, monkeypatch):
        (tmp_path / "fla" / "ops").mkdir(parents=True)
        (tmp_path / "fla" / "ops" / "__init__.py").write_text("mine = True\n")
        monkeypatch.syspath_prepend(tmp_path)
        with fla_npu.enabled() as report:
            assert "fla" not in report.routes and importlib.import_module("fla.ops").mine
            fla_npu.enable()
        assert imported("fla") == {"fla", "fla.ops"}
        del sys.modules["fla"], sys.modules["fla.ops"]

    def test_transformers_does_not_remember_the_stand_ins(self, monkeypatch):
        """It asks for them where it finds a GPU, or an NPU that calls itself one, and keeps the answer."""
        from transformers.utils import import_utils

        monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
        asked = import_utils.is_flash_linear_attention_available, import_utils.is_causal_conv1d_available

        def answers() -> list[bool]:
            return [ask() for ask in asked]

        assert answers() == [False, False]
        with fla_npu.enabled():
            assert answers() == [True, True]
            with hook._active.imports._installed.hidden():  # as when a modeling module is imported
                assert answers() == [False, False]
            assert answers() == [True, True]
        assert answers() == [False, False]

    def test_transformers_does_not_keep_the_stand_ins_as_kernels(self, monkeypatch):
        """Up to 5.14, layers of Mamba ask for causal_conv1d in this way."""
        from transformers.integrations import hub_kernels
        from transformers.utils import import_utils

        monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
        monkeypatch.setitem(hub_kernels._HUB_KERNEL_MAPPING, "causal-conv1d", {"repo_id": "none"})
        other = types.ModuleType("other")
        monkeypatch.setitem(hub_kernels._KERNEL_MODULE_MAPPING, "other", other)
        before = dict(hub_kernels._KERNEL_MODULE_MAPPING)
        import_utils.is_causal_conv1d_available.cache_clear()
        with fla_npu.enabled():
            assert hasattr(hub_kernels.lazy_load_kernel("causal-conv1d"), "causal_conv1d_fn")
        assert before == hub_kernels._KERNEL_MODULE_MAPPING
        import_utils.is_causal_conv1d_available.cache_clear()

    def test_a_real_package_is_named_in_the_report(self, tmp_path, monkeypatch):
        for name in ("fla", "causal_conv1d"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(hook, "_version", {"fla-core": "0.5.2", "transformers": "5.24.0"}.get)
        with fla_npu.enabled() as report:
            assert report.skipped["fla"] == "FLA 0.5.2 has no registry of backends yet: 0.6 has"
            assert report.skipped["causal_conv1d"].startswith("installed")
            assert set(report.routes) == {"transformers"}
        monkeypatch.setattr(hook, "_version", {"fla-core": "0.6.0"}.get)
        monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))  # what some put there to import FLA
        with fla_npu.enabled() as report:
            assert report.routes["fla"].startswith("FLA 0.6.0")


class TestModulesImportedMeanwhile:
    def test_are_served(self, forgotten_modeling_module):
        report = fla_npu.enable()
        module = importlib.import_module(forgotten_modeling_module)
        assert f"{forgotten_modeling_module}.torch_chunk_gated_delta_rule" in report.patched
        x, g = torch.randn(1, 5, 2, 8), -torch.rand(1, 5, 2)
        module.torch_chunk_gated_delta_rule(x, x, x, g=g, beta=-g)
        assert report.calls == {"chunk_gated_delta_rule": 1}

    @pytest.mark.usefixtures("no_fla")
    def test_become_what_they_would_have_been(self, forgotten_modeling_module, monkeypatch):
        with fla_npu.enabled():
            for name in ("causal_conv1d", "fla.ops.gated_delta_rule"):
                importlib.import_module(name)
            module = importlib.import_module(forgotten_modeling_module)
            assert "fla.ops" in sys.modules  # hidden from the modeling module only
        x, g = torch.randn(1, 5, 2, 8), -torch.rand(1, 5, 2)

        def used(*args, **kwargs):
            raise AssertionError("fla_npu was called")

        # Would be found through a closure that the modeling module made from what `fla` was.
        for owner, name in (
            (fla_npu.ops.gated_delta_rule.chunk, "call"),
            (fla_npu.integrations.causal_conv1d, "causal_conv1d"),
        ):
            monkeypatch.setattr(owner, name, used)
        module.torch_chunk_gated_delta_rule(x, x, x, g=g, beta=-g)
        module.causal_conv1d_fn(torch.randn(1, 8, 5), torch.randn(8, 4), activation="silu")
        assert module.__spec__.loader is module.__loader__
        assert type(module.__loader__).__name__ == "SourceFileLoader"

    def test_are_served_again_after_a_reload(self, forgotten_modeling_module):
        module = importlib.import_module(forgotten_modeling_module)
        fla_npu.enable()
        importlib.reload(module)
        assert module.torch_chunk_gated_delta_rule.__code__.co_filename == transformers.__file__
        fla_npu.disable()
        assert module.torch_chunk_gated_delta_rule.__code__.co_filename != transformers.__file__

    def test_leave_nothing_of_this_package_in_transformers(self):
        """Also in its maps and in what its functions have closed over."""
        code = """
import sys, fla_npu
fla_npu.enable(layers=True)
import torch
from tests.tiny_models import tiny_model
for family in ("Qwen3_5", "KimiLinear"):
    tiny_model(family)(torch.ones(1, 5, dtype=torch.long))
assert fla_npu.enable().calls
fla_npu.disable()

seen, todo = {}, [(name, m) for name, m in list(sys.modules.items()) if name.partition(".")[0] == "transformers"]
while todo:
    path, value = todo.pop()
    if id(value) in seen:
        continue
    seen[id(value)] = value
    code, module = getattr(value, "__code__", None), getattr(value, "__module__", "")
    where = f"{type(value).__module__} {module} {getattr(value, '__name__', '')} {getattr(code, 'co_filename', '')}"
    assert "fla_npu" not in where, path
    if isinstance(value, dict):
        inner = [x for item in dict.items(value) for x in item]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = list(value)
    elif code is not None:
        inner = [cell.cell_contents for cell in value.__closure__ or () if cell != type(cell)()]
    else:
        inner = [dict(vars(value))] if "transformers" in where and hasattr(value, "__dict__") else []
    todo += [(f"{path} -> {type(x).__name__}", x) for x in inner if not isinstance(x, type(sys))]
print(len(seen))
"""
        assert int(run(code)[-1]) > 10000

    @pytest.mark.skipif(not layers._has_cache_states(), reason="whole layers need transformers 5.22")
    def test_are_served_whole_again_after_a_reload(self, module_to_reload):
        module = module_to_reload
        old, model = module.Qwen3_5GatedDeltaNet, build("qwen3_5")
        layer = next(m for m in model.modules() if type(m) is old)
        report = fla_npu.enable(layers=True)
        importlib.reload(module)
        new = module.Qwen3_5GatedDeltaNet
        assert new is not old and type(layer) is old
        later = AutoModelForCausalLM.from_config(text_config("qwen3_5"))
        assert any(isinstance(m, new) and type(m) is not new for m in later.modules())
        with torch.inference_mode():
            later(torch.ones(1, 5, dtype=torch.long))
            assert report.calls["Qwen3_5GatedDeltaNet"] == report.calls["chunk_gated_delta_rule"] == 3
            model(torch.ones(1, 5, dtype=torch.long))  # its class is the former one, whose module is the same
            assert report.calls["Qwen3_5GatedDeltaNet"] == 3 and report.calls["chunk_gated_delta_rule"] == 6
        fla_npu.disable()
        assert module.Qwen3_5GatedDeltaNet is new and any(type(m) is new for m in later.modules())
        assert not layers._patching().get_patch_mapping()

    def test_have_loaders_that_can_what_others_can(self, forgotten_modeling_module):
        """`python -m` and debuggers ask for more than to load."""
        with fla_npu.enabled():
            loader = importlib.util.find_spec(forgotten_modeling_module).loader
            assert loader.get_code(forgotten_modeling_module).co_filename == loader.path


class TestSwitch:
    @pytest.mark.parametrize("step", ["start", "extend"])
    def test_a_failure_leaves_nothing(self, step, monkeypatch):
        path, active = list(sys.meta_path), hook._Active
        with monkeypatch.context() as patch:

            def fail(self, *args):
                original(self, *args)
                raise KeyError(step)

            original = getattr(active, step)
            patch.setattr(active, step, fail)
            with pytest.raises(KeyError, match=step):
                fla_npu.enable()
            assert sys.meta_path == path
        with fla_npu.enabled():
            assert sys.meta_path != path
        assert sys.meta_path == path

    def test_blocks_nest_and_survive_exceptions(self):
        path = list(sys.meta_path)
        with fla_npu.enabled() as outer:
            with pytest.raises(KeyError), fla_npu.enabled() as inner:
                assert inner is outer
                raise KeyError
            assert sys.meta_path != path
        assert sys.meta_path == path
        with fla_npu.enabled() as later:
            assert later is not outer

    def test_disable_twice_is_disable_once(self):
        path = list(sys.meta_path)
        fla_npu.disable()
        fla_npu.enable()
        fla_npu.disable()
        fla_npu.disable()
        assert sys.meta_path == path

    def test_disable_within_a_block_ends_it(self):
        path = list(sys.meta_path)
        with fla_npu.enabled():
            fla_npu.disable()
            assert sys.meta_path == path
        assert sys.meta_path == path

    def test_many_threads(self, forgotten_modeling_module):
        path, before = list(sys.meta_path), set(sys.modules)
        module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
        globals_before = dict(vars(module))
        x, g = torch.randn(1, 3, 1, 4), -torch.rand(1, 3, 1)
        failures, start = [], threading.Barrier(8)

        def work(number: int) -> None:
            try:
                start.wait()
                for _ in range(15):
                    with fla_npu.enabled() as report:
                        calls = report.calls["chunk_gated_delta_rule"]
                        module.torch_chunk_gated_delta_rule(x, x, x, g=g, beta=-g)
                        assert report.calls["chunk_gated_delta_rule"] > calls
                        if number % 2:
                            importlib.import_module(forgotten_modeling_module)
                            importlib.import_module("fla_npu.ops.kda.gate")
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert not failures
        assert sys.meta_path == path
        assert vars(module) == globals_before
        assert not {name for name in set(sys.modules) - before if name == "fla" or name.startswith("fla.")}

    @pytest.mark.usefixtures("no_fla")
    def test_an_import_of_the_stand_ins_in_another_thread_does_not_reach_a_modeling_module(self):
        def imports() -> None:
            for name in ("causal_conv1d", "fla.ops.kda"):
                importlib.import_module(name)

        with fla_npu.enabled(), hook._active.imports._installed.hidden():
            other = threading.Thread(target=imports)
            other.start()
            other.join()
            assert "fla" in sys.modules
            for name, function in (("fla", "chunk_kda"), ("fla", "ops"), ("causal_conv1d", "causal_conv1d_fn")):
                with pytest.raises(ModuleNotFoundError, match=name):
                    getattr(importlib.import_module(name), function)

    def test_an_import_in_another_thread_is_waited_for(self):
        """A module that is being imported when `enable()` comes is served as well."""
        name = "transformers.models.slow.modeling_slow"
        running, go_on = threading.Event(), threading.Event()

        class Slow(importlib.abc.Loader):
            def exec_module(self, module):
                running.set()
                assert go_on.wait(30)
                module.torch_chunk_gated_delta_rule = lambda query, key, value, **kwargs: None

        class Finder(importlib.abc.MetaPathFinder):
            def find_spec(self, fullname, path, target=None):
                return importlib.machinery.ModuleSpec(name, Slow()) if fullname == name else None

        parent = types.ModuleType("transformers.models.slow")
        parent.__path__ = []
        sys.modules[parent.__name__] = parent
        sys.meta_path.insert(0, Finder())
        try:
            importing = threading.Thread(target=importlib.import_module, args=(name,))
            importing.start()
            assert running.wait(30)
            threading.Timer(0.2, go_on.set).start()
            report = fla_npu.enable()
            importing.join(30)
            assert f"{name}.torch_chunk_gated_delta_rule" in report.patched
        finally:
            go_on.set()
            fla_npu.disable()
            del sys.meta_path[0], sys.modules[name], sys.modules[parent.__name__]


def test_finders_that_ask_all_others_do_not_ask_each_other_for_ever(forgotten_modeling_module):
    class Delegates(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            return next(filter(None, specs), None)

    delegates = Delegates()
    report = fla_npu.enable()
    sys.meta_path.insert(0, delegates)
    try:
        importlib.import_module(forgotten_modeling_module)
    finally:
        sys.meta_path.remove(delegates)
    assert f"{forgotten_modeling_module}.torch_chunk_gated_delta_rule" in report.patched


def test_a_finder_that_enables_while_enabling(monkeypatch):
    class Enables(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name == "fla":
                fla_npu.enable()

    path = list(sys.meta_path)
    monkeypatch.setattr(sys, "meta_path", [Enables(), *path])
    report = fla_npu.enable()
    assert [type(finder).__name__ for finder in sys.meta_path].count("_Finder") == 1
    assert fla_npu.enable() is report
    fla_npu.disable()
    assert sys.meta_path[1:] == path


def run(code: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_works_without_transformers_and_triton():
    code = (
        "import sys; sys.modules.update(transformers=None, triton=None)\n"
        "import fla_npu, fla_npu.integrations.hook as hook\n"
        "hook._version = {}.get\n"
        "print(*fla_npu.enable().skipped)\n"
        "hook.installed_elsewhere('fla') or exec('from fla import *; GatedDeltaNet')"
    )
    assert "transformers" in run(code)


def test_enabling_imports_nothing_heavy():
    code = (
        "import sys, fla_npu; before = set(sys.modules); fla_npu.enable();"
        "print(*[name for name in set(sys.modules) - before if '.' not in name or name == 'torch._dynamo'])"
    )
    assert not {"transformers", "triton", "fla", "torch_npu", "torch._dynamo"} & set(run(code))
