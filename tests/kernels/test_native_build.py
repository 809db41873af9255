"""Building the native ops: what is chosen, where it lands, and what is said when it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.native import build
from kernels.native.build import ISAS, NoNativeOps, isas
from tests.kernels.native_libraries import FOLDER, library_path


@pytest.fixture(autouse=True)
def no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make serve` has built in this tree is not found."""
    monkeypatch.setattr(build, "BUILT", tmp_path / "not an image")


AVX2 = frozenset(["avx2", "fma", "f16c"])


def test_the_best_instruction_set_comes_first() -> None:
    avx512 = AVX2 | frozenset(["avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"])
    assert [isa.name for isa in isas("x86_64", avx512)] == ["avx512vnni", "avx2", "portable"]
    assert [isa.name for isa in isas("x86_64", avx512 | {"avx_vnni"})][:2] == ["avx512vnni", "avxvnni"]
    assert [isa.name for isa in isas("x86_64", AVX2)] == ["avx2", "portable"]
    assert [isa.name for isa in isas("x86_64", frozenset(["avx2"]))] == ["portable"]
    assert [isa.name for isa in isas("aarch64", frozenset(["asimddp"]))] == ["dotprod", "portable"]
    assert [isa.name for isa in isas("riscv64", frozenset())] == ["portable"]


@pytest.fixture
def portable_alone(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only portable code is known, and the compiler has compiled it before."""
    library, compiler = library_path(ISAS[-1]), tmp_path_factory.mktemp("bin") / "cc"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-mno-such-flag*) echo "error: unknown -mno-such-flag" >&2; exit 1;; esac\n'
        'while [ "$1" != -o ]; do shift; done\n'
        f'exec cp "{library}" "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/usr/bin:/bin")
    monkeypatch.setattr(build, "COMPILERS", ("cc",))
    monkeypatch.setattr(build, "ISAS", ISAS[-1:])


def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, portable_alone: None) -> None:
    said: list[str] = []
    first = build.load(tmp_path / "new", said.append)
    assert first.name == build.library_name(ISAS[-1]) and len(said) == 1 and "Compiling" in said[0]
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    assert build.load(tmp_path / "new", said.append).name == first.name
    assert len(said) == 1
    assert [p.name for p in (tmp_path / "new").iterdir()] == [build.file_name(ISAS[-1])]


def test_the_name_follows_sources_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {build.library_name(isa) for isa in ISAS}
    assert len(names) == len(ISAS)
    for path in build.sources():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "HERE", tmp_path)
    assert build.library_name(ISAS[0]) in names
    (tmp_path / "pool.c").write_text("/* changed */")
    assert build.library_name(ISAS[0]) not in names


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoNativeOps, match="no C compiler"):
        build.load(tmp_path, lambda line: None)
    assert build.main([str(tmp_path / "x")]) == 1


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\necho 'x.c:1: error: no such thing' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(NoNativeOps, match="error: no such thing"):
        build.build(ISAS[-1], tmp_path / "out", lambda line: None)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_compiler_that_lacks_the_best_instruction_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, portable_alone: None
) -> None:
    """An older one knows no -mavxvnni: the next best is built, not torch chosen."""
    unknown = build.Isa("unknown", "", frozenset(), ("-mno-such-flag",))
    monkeypatch.setattr(build, "ISAS", (unknown, ISAS[-1]))
    said: list[str] = []
    assert build.load(tmp_path, said.append).name == build.library_name(ISAS[-1])
    assert "portable instead" in said[-1] and "-mno-such-flag" in said[-1]
    assert build.main(["--all", str(tmp_path / "all")]) == 0
    assert [p.name for p in (tmp_path / "all").iterdir()] == [build.file_name(ISAS[-1])]


def test_a_folder_for_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    here = build.file_name(ISAS[-1])
    monkeypatch.setattr(build.platform, "machine", lambda: "another")
    assert build.file_name(ISAS[-1]) != here


def test_a_damaged_library(tmp_path: Path) -> None:
    for isa in ISAS:
        (tmp_path / build.file_name(isa)).write_bytes(b"\x7fELF nonsense")
    with pytest.raises(NoNativeOps, match=r"headrace-.*\.so"):
        build.load(tmp_path, lambda line: None)


def test_the_command_builds_for_this_machine(tmp_path: Path, portable_alone: None) -> None:
    assert build.main([str(tmp_path)]) == 0
    assert [p.name for p in tmp_path.iterdir()] == [build.file_name(ISAS[-1])]
    assert tmp_path != FOLDER
