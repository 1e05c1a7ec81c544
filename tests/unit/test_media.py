"""Every way to name a picture or a video gives the same pixels; every mode gives 8-bit RGB; what cannot be read is named."""

from __future__ import annotations

import base64
import functools
import io
import logging
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from swiftcp.data import downloads
from swiftcp.data.media import (
    MediaAccess,
    MediaError,
    check_image,
    image_size,
    read_frames,
    read_image,
    resolve,
    to_rgb,
    video_header,
    within,
)
from swiftcp.data.rows import MediaSource

from .data_fixtures import grey_of, picture, turn_video, write_video

ACCESS = MediaAccess()


def png(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


def frames_of(source: MediaSource, folder: Path, indices: list[int]) -> np.ndarray:
    return np.stack(read_frames(source, folder, ACCESS, indices, lambda frame: frame))


def refused(source: MediaSource, folder: Path, access: MediaAccess = ACCESS) -> str:
    with pytest.raises(MediaError) as caught:
        check_image(source, folder, access)
    return str(caught.value)


def test_case_08_one_picture_six_ways(tmp_path: Path) -> None:
    image = picture(40, 30)
    contents = png(image)
    (tmp_path / "a b.png").write_bytes(contents)
    encoded = base64.b64encode(contents).decode()
    sources: list[MediaSource] = [
        "a b.png",
        str(tmp_path / "a b.png"),
        f"file://{tmp_path}/a%20b.png",
        f"data:image/png;base64,{encoded}",
        f"data:;base64,{encoded[:20]}\n{encoded[20:]}",
        contents,
    ]
    for source in sources:
        assert image_size(source, tmp_path, ACCESS) == (30, 40)
        assert np.array_equal(read_image(source, tmp_path, ACCESS), image)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("missing.png", "missing.png is no file (looked for"),
        ("iVBORw0KGgo" * 500, "is no file (looked for"),
        ("s3://bucket/a.png", "unknown scheme s3: use a path"),
        ("http://127.0.0.1:9/a.png", "downloads are off"),
        ("HTTPS://127.0.0.1:9/a.png", "downloads are off"),
        ("data:image/png;base64", "has no comma"),
        ("data:image/png;base64,???", "is no base64"),
    ],
)
def test_sources_that_are_refused(source: str, words: str, tmp_path: Path) -> None:
    assert words in refused(source, tmp_path)


def test_downloads_where_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[str] = []

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            requests.append(self.path)

        def do_GET(self) -> None:
            if self.path == "/moved.png":
                self.send_response(302)
                self.send_header("Location", "/a.png")
                self.end_headers()
                return
            super().do_GET()

    allowed = MediaAccess(allow_http=True)
    (tmp_path / "a.png").write_bytes(png(picture(9, 8)))
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0"):
            assert "an address of this machine" in refused(f"http://{host}:{server.server_port}/a.png", tmp_path, allowed)
        assert requests == []
        monkeypatch.setattr(downloads, "check_host", lambda host: None)
        assert image_size(f"{url}/a.png", tmp_path, allowed) == (8, 9)
        assert "cannot be fetched: HTTP Error 404" in refused(f"{url}/b.png", tmp_path, allowed)
        assert "HTTP Error 302: Found, to /a.png: name that address" in refused(f"{url}/moved.png", tmp_path, allowed)
        server.shutdown()


def test_nothing_outside_of_media_root_is_read(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside.png"
    root.mkdir()
    outside.write_bytes(png(picture(4, 4)))
    (root / "in.png").write_bytes(outside.read_bytes())
    (root / "link.png").symlink_to(outside)
    access = MediaAccess(media_root=root)
    assert image_size("in.png", root, access) == image_size(f"file://{root}/in.png", root, access) == (4, 4)
    for source in ("../outside.png", str(outside), f"file://{outside}", "link.png", "missing/../../outside.png", "/etc/passwd"):
        assert "lies outside of media_root" in refused(source, root, access)
    assert image_size("../outside.png", root, ACCESS) == (4, 4)


def test_play_lists_and_postscript_lead_nowhere(tmp_path: Path) -> None:
    write_video(tmp_path / "real.mp4", num_frames=4)
    lists = {
        "list.m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{tmp_path}/real.mp4\n#EXT-X-ENDLIST\n",
        "list.mp4": "ffconcat version 1.0\nfile real.mp4\n",
    }
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(MediaError, match=f"video {name} cannot be read"):
            video_header(name, tmp_path, ACCESS)
    (tmp_path / "page.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    assert "page.png cannot be read" in refused("page.png", tmp_path)


def test_case_43_what_takes_long_is_named_and_what_hangs_is_given_up(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    assert within(5, "video a.mp4", lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(5, "video a.mp4", lambda: 1 / 0)
    release = threading.Event()
    with pytest.raises(MediaError, match=r"video a.mp4 took more than 0.05 s to decode and was given up: .* raise media_timeout"):
        within(0.05, "video a.mp4", release.wait)
    release.set()
    monkeypatch.setattr("swiftcp.data.media._SLOW_SECONDS", 0.0)
    within(5, "video b.mp4", lambda: 3)
    assert "video b.mp4 took 0 s to decode" in caplog.text


def test_case_02_broken_files_are_named(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    picture(200, 160).save(buffer, "JPEG")
    files = {"cut.jpg": buffer.getvalue()[: len(buffer.getvalue()) // 2], "empty.png": b"", "text.png": b"hello"}
    files["cut.png"] = png(picture(100, 80))[:3000]
    for name, contents in files.items():
        (tmp_path / name).write_bytes(contents)
        assert f"image {name} cannot be read" in refused(name, tmp_path)
        with pytest.raises(MediaError, match=name):
            read_image(name, tmp_path, ACCESS)


def test_case_02_whole_files_pass(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    picture(200, 160).save(buffer, "JPEG")
    check_image(buffer.getvalue(), tmp_path, ACCESS)
    check_image(png(picture(3, 2)), tmp_path, ACCESS)


def test_case_06_the_decompression_guard_stays(tmp_path: Path) -> None:
    (tmp_path / "huge.png").write_bytes(png(Image.new("1", (20_000, 20_000))))
    guard = Image.MAX_IMAGE_PIXELS
    assert "huge.png is too large to decode" in refused("huge.png", tmp_path)
    assert image_size("huge.png", tmp_path, MediaAccess(max_image_pixels=400_000_000)) == (20_000, 20_000)
    assert "400000000 pixels" not in refused("huge.png", tmp_path, MediaAccess(max_image_pixels=1000))
    assert guard == Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize("byte_order", ["<u2", ">u2"])
def test_case_07_sixteen_bits_are_scaled(byte_order: str, tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 512).astype(byte_order).reshape(1, -1).repeat(4, 0)
    buffer = io.BytesIO()
    Image.fromarray(ramp).save(buffer, "TIFF")
    pixels = np.asarray(read_image(buffer.getvalue(), tmp_path, ACCESS))
    assert pixels.shape == (4, 512, 3)
    assert len(np.unique(pixels)) >= 200 and pixels[0, 0, 0] == 0 and pixels[0, -1, 0] == 255


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"])
def test_case_07_every_mode_becomes_rgb(mode: str) -> None:
    image = picture(16, 12)
    pixels = np.asarray(to_rgb(image.convert(mode) if mode != "PA" else image.convert("P").convert("PA")), dtype=int)
    expected = np.asarray(image.convert("L" if mode in ("1", "L", "LA") else "RGB").convert("RGB"), dtype=int)
    assert pixels.shape == (12, 16, 3)
    assert np.abs(pixels - expected).mean() < (128 if mode == "1" else 20)


def test_alpha_is_laid_on_white(tmp_path: Path) -> None:
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([200, 0, 0, 0, 200, 0])
    palette.putpixel((1, 0), 1)
    contents = png(palette, transparency=0)
    assert np.asarray(read_image(contents, tmp_path, ACCESS)).tolist() == [[[255, 255, 255], [0, 200, 0]]]
    assert np.asarray(to_rgb(Image.new("RGBA", (1, 1), (0, 0, 0, 127)))).tolist() == [[[128, 128, 128]]]
    assert np.asarray(to_rgb(Image.new("LA", (1, 1), (9, 0)))).tolist() == [[[255, 255, 255]]]


def test_depths_without_a_range_are_refused() -> None:
    with pytest.raises(MediaError, match="32-bit floats"):
        to_rgb(Image.new("F", (2, 2)))
    with pytest.raises(MediaError, match="32-bit integers"):
        to_rgb(Image.new("I", (2, 2), 70_000))
    assert np.asarray(to_rgb(Image.new("I", (1, 1), 0xFFFF))).tolist() == [[[255, 255, 255]]]


def test_exif_turns_the_image(tmp_path: Path) -> None:
    image = picture(40, 30)
    exif = Image.Exif()
    exif[0x0112] = 6
    contents = png(image, exif=exif)
    assert image_size(contents, tmp_path, ACCESS) == (40, 30)
    assert np.array_equal(read_image(contents, tmp_path, ACCESS), np.rot90(np.asarray(image), k=-1))


def test_case_07_gif_uses_its_first_frame(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "lime", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    with caplog.at_level(logging.INFO, logger="swiftcp.data.media"):
        assert read_image("a.gif", tmp_path, ACCESS).getpixel((0, 0)) == (255, 0, 0)
    assert "a.gif has several frames" in caplog.text


def test_video_header_and_frames(tmp_path: Path) -> None:
    write_video(tmp_path / "v.mp4", num_frames=20, size=(64, 48), fps=8)
    header = video_header("v.mp4", tmp_path, ACCESS)
    assert (header.num_frames, header.fps, header.height, header.width) == (20, 8.0, 48, 64)
    frames = frames_of("v.mp4", tmp_path, [0, 7, 7, 19])
    assert frames.shape == (4, 48, 64, 3) and frames.dtype == np.uint8
    expected = [grey_of(index, 20) for index in (0, 7, 7, 19)]
    assert np.abs(frames.mean(axis=(1, 2, 3)) - expected).max() < 4


def test_video_from_bytes_and_without_a_count(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mkv", num_frames=9)
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 0
    assert video_header("v.mkv", tmp_path, ACCESS).num_frames == 9
    assert video_header(path.read_bytes(), tmp_path, ACCESS).num_frames == 9
    assert np.array_equal(frames_of(path.read_bytes(), tmp_path, [8]), frames_of("v.mkv", tmp_path, [8]))


def test_video_is_turned_upright(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", num_frames=2, size=(64, 48))
    turn_video(path, tmp_path / "turned.mp4", 90)
    header = video_header("turned.mp4", tmp_path, ACCESS)
    assert (header.height, header.width) == (64, 48)
    assert frames_of("turned.mp4", tmp_path, [0]).shape == (1, 64, 48, 3)


def test_video_that_ends_early(tmp_path: Path) -> None:
    write_video(tmp_path / "v.mp4", num_frames=9)
    repeated = frames_of("v.mp4", tmp_path, [8, 10])
    assert np.array_equal(repeated[0], repeated[1])
    with pytest.raises(MediaError, match=r"v.mp4 ends after 9 of at least 12 frames"):
        frames_of("v.mp4", tmp_path, [0, 11])


def test_videos_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("hello")
    whole = write_video(tmp_path / "v.mp4", num_frames=9).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    for name in ("empty.mp4", "text.mp4", "cut.mp4"):
        with pytest.raises(MediaError, match=rf"video {name} (cannot be read|has no video stream)"):
            video_header(name, tmp_path, ACCESS)
    with pytest.raises(MediaError, match=r"no.mp4 is no file"):
        video_header("no.mp4", tmp_path, ACCESS)


def test_sound_without_pictures(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "sound.wav"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), dtype=np.int16), format="s16", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(MediaError, match=r"sound.wav has no video stream"):
        video_header("sound.wav", tmp_path, ACCESS)


def test_resolve_gives_paths_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    assert resolve("a.png", tmp_path, ACCESS) == tmp_path / "a.png"
    assert resolve("data:,a%20b", tmp_path, ACCESS) == b"a b"
