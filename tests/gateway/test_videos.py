"""/v1/videos on real processes with a scripted camera, through the official client where it has the call."""

import asyncio
import base64
import io
import os
import random

import aiohttp
import av
import openai
import pytest

from tests.gateway.pictures import picture
from tests.pipelines import up

pytestmark = [
    pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning"),
    pytest.mark.usefixtures("studio"),  # it outlives this module, so it is to be there before the module begins
]

VIDEOS = "/v1/videos"
KILLED = """
[pipeline]
name = "killed-gateway"
[run]
restart_delay_s = 0.05
[[stage]]
name = "c"
use = "testing.video"
[stage.args]
has_sound = true
"""


def frames(data):
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


async def finished(http, video_id):
    """The job, once it has ended."""
    while True:
        async with http.get(f"{VIDEOS}/{video_id}") as response:
            job = await response.json()
        if job["status"] in ("completed", "failed"):
            return job
        await asyncio.sleep(0.02)  # the protocol's own way to wait


async def test_a_job_runs_to_a_video(openai_studio):
    job = await openai_studio.videos.create(model="sora-2", prompt="a cat", seconds="4", size="64x48")
    assert job.status in ("queued", "in_progress")
    assert (job.seconds, job.size, job.object, job.completed_at, job.expires_at) == ("4", "64x48", "video", None, None)
    job = await openai_studio.videos.poll(job.id)
    assert (job.status, job.progress, job.error, job.model) == ("completed", 100, None, "sora-2")
    assert job.expires_at > job.completed_at >= job.created_at
    content = (await openai_studio.videos.download_content(job.id)).content
    pictures = frames(content)
    assert (len(pictures), pictures[0].shape) == (32, (48, 64, 3))
    assert all(abs(int(pictures[n].mean()) - 8 * n) < 4 for n in range(32))  # in order, and as they were
    assert (await openai_studio.videos.delete(job.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await openai_studio.videos.retrieve(job.id)


async def test_a_first_image_is_a_file_or_a_data_url(openai_studio, studio_http):
    job = await openai_studio.videos.create_and_poll(prompt="a cat", input_reference=("a.png", picture()))
    assert (job.status, job.size, job.seconds) == ("completed", "64x48", "2")
    url = "data:image/png;base64," + base64.b64encode(picture()).decode()
    form = aiohttp.FormData({"prompt": "a cat", "input_reference[image_url]": url}, default_to_multipart=True)
    for body in ({"json": {"prompt": "a cat", "input_reference": {"image_url": url}}}, {"data": form}):
        async with studio_http.post(VIDEOS, **body) as response:
            job = await finished(studio_http, (await response.json())["id"])
        assert job["status"] == "completed"


async def test_progress_rises_in_whole_per_cents(studio_http):
    async with studio_http.post(VIDEOS, json={"prompt": "10 ms", "num_inference_steps": 30}) as response:
        job = await response.json()
    seen = []
    while job["status"] not in ("completed", "failed"):
        async with studio_http.get(f"{VIDEOS}/{job['id']}") as response:
            job = await response.json()
        if job["progress"] not in seen[-1:]:
            seen.append(job["progress"])
    assert seen == sorted(seen)
    assert len(seen) > 3
    assert all(type(value) is int for value in seen)
    assert seen[-1] == 100


async def test_a_job_that_fails_says_why(studio_http):
    async with studio_http.post(VIDEOS, json={"prompt": "fail at 2"}) as response:
        job = await finished(studio_http, (await response.json())["id"])
    assert (job["status"], job["error"]["code"]) == ("failed", "stage_failed")
    assert "told to fail at step 2" in job["error"]["message"]
    async with studio_http.get(f"{VIDEOS}/{job['id']}/content") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (409, "not_ready")


async def test_deleting_a_job_stops_its_work(studio_http, work_of):
    async with studio_http.post(VIDEOS, json={"prompt": "20 ms", "num_inference_steps": 100}) as response:
        job = await response.json()
    await work_of("camera", running=1)
    async with studio_http.get(f"{VIDEOS}/{job['id']}/content") as response:
        assert response.status == 409
    async with studio_http.delete(f"{VIDEOS}/{job['id']}") as response:
        assert await response.json() == {"id": job["id"], "object": "video.deleted", "deleted": True}
    async with asyncio.timeout(1):  # the work would take 2 s
        await work_of("camera", running=0)
    async with studio_http.get(f"{VIDEOS}/{job['id']}") as response:
        assert response.status == 404


async def test_any_gateway_answers_for_a_job_and_can_stop_it(studio_http, studio_serving, work_of):
    async with studio_serving() as other:
        async with other.post(VIDEOS, json={"prompt": "20 ms", "num_inference_steps": 100}) as response:
            job = await response.json()
        await work_of("camera", running=1)
        async with studio_http.get(f"{VIDEOS}/{job['id']}") as response:
            assert (await response.json())["status"] == "in_progress"
        async with studio_http.delete(f"{VIDEOS}/{job['id']}") as response:
            assert response.status == 200
        async with asyncio.timeout(1):
            await work_of("camera", running=0)


async def test_a_gateway_that_stops_leaves_its_jobs_failed(studio_http, studio_serving, work_of):
    async with studio_serving() as other:
        async with other.post(VIDEOS, json={"prompt": "20 ms", "num_inference_steps": 100}) as response:
            job = await response.json()
        await work_of("camera", running=1)
        other.serving.cancel()
        await asyncio.gather(other.serving, return_exceptions=True)
    async with studio_http.get(f"{VIDEOS}/{job['id']}") as response:
        job = await response.json()
    assert (job["status"], job["error"]["code"]) == ("failed", "unavailable")


async def test_videos_are_listed_page_by_page(openai_studio):
    made = [(await openai_studio.videos.create_and_poll(prompt=f"cat {n}", poll_interval_ms=20)).id for n in range(3)]
    newest_first = [job.id async for job in openai_studio.videos.list(limit=2)]
    assert newest_first[:3] == made[::-1]
    page = await openai_studio.videos.list(limit=1, order="desc")
    assert (page.has_more, page.last_id) == (True, made[-1])
    with pytest.raises(openai.BadRequestError):
        await openai_studio.videos.list(after="video_0")


async def test_sync_is_the_file_as_it_is_made(studio_http):
    async with studio_http.post(f"{VIDEOS}/sync", json={"prompt": "a cat", "num_frames": 17, "size": "64x48", "fps": 4}) as response:
        assert (response.status, response.headers["Content-Type"]) == (200, "video/mp4")
        data = await response.read()
    assert len(frames(data)) == 17
    assert data[4:8] == b"ftyp"
    assert data.count(b"moof") >= 4  # one fragment a second


async def test_a_sync_client_that_goes_away_ends_the_work(studio_http, work_of):
    asking = asyncio.create_task(studio_http.post(f"{VIDEOS}/sync", json={"prompt": "20 ms", "num_inference_steps": 100}))
    await work_of("camera", running=1)
    asking.cancel()
    async with asyncio.timeout(1):
        await work_of("camera", running=0)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"size": "4096x4096"}, 400, "size"),
        ({"seconds": "31"}, 400, "seconds"),
        ({"seconds": "long"}, 400, "seconds"),
        ({"seconds": 0}, 400, "seconds"),
        ({"num_frames": 241}, 400, "num_frames"),
        ({"num_frames": 9, "seconds": 1}, 400, "num_frames"),
        ({"num_inference_steps": 10**9}, 400, "num_inference_steps"),
        ({"input_reference": {"image_url": "http://example.com/a.png"}}, 400, "input_reference.image_url"),
        ({"input_reference": {"image_url": "data:image/png;base64,####"}}, 400, "input_reference.image_url"),
        ({"input_reference": {"image_url": "data:image/png;base64,AAAA"}}, 400, "input_reference"),
        ({"input_reference": {"file_id": "file-1"}}, 400, "input_reference.file_id"),
        ({"model": "veo"}, 404, "model"),
        ({"prompt": ""}, 400, "prompt"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [VIDEOS, f"{VIDEOS}/sync"])
async def test_what_can_not_be_made_is_refused_before_any_work(studio_http, path, body, status, param):
    async with studio_http.post(path, json={"prompt": "a cat", **body}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["type"], error["param"]) == (status, "invalid_request_error", param)


@pytest.mark.parametrize("name", ["video_0", "..", "%2e%2e", "img_" + "0" * 32, "video_" + "0" * 32])
async def test_an_unknown_video_is_a_404(studio_http, name):
    for ask in (studio_http.get, studio_http.delete):
        async with ask(f"{VIDEOS}/{name}") as response:
            assert (response.status, (await response.json())["error"]["code"]) in ((404, "not_found"), (405, "method_not_allowed"))


async def test_a_full_server_takes_no_more_jobs(studio_serving):
    async with studio_serving(max_requests=2) as http:
        async with http.post(VIDEOS, json={"prompt": "20 ms", "num_inference_steps": 100}) as response:
            assert response.status == 200
            job = await response.json()
        async with http.post(VIDEOS, json={"prompt": "a cat"}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (429, "overloaded")
        async with http.delete(f"{VIDEOS}/{job['id']}") as response:
            assert response.status == 200


async def test_a_job_for_which_there_is_no_place_in_the_line_is_refused_and_is_no_job(studio_serving):
    ask = {"prompt": "20 ms each", "num_inference_steps": 100}
    made = []
    async with studio_serving() as http:
        for _ in range(80):  # the line holds 64, and the stage 4 of this gateway at most
            async with http.post(VIDEOS, json=ask) as response:
                status, answer = response.status, await response.json()
            if status != 200:
                break
            made.append(answer["id"])
        assert (status, answer["error"]["code"], len(made) >= 64) == (429, "overloaded", True)
        async with http.get(VIDEOS, params={"limit": 100}) as response:
            listed = {job["id"]: job["status"] for job in (await response.json())["data"] if job["prompt"] == ask["prompt"]}
        assert set(listed) == set(made)
        assert "failed" not in listed.values()
        for response in await asyncio.gather(*(http.delete(f"{VIDEOS}/{name}") for name in made)):
            response.close()
            assert response.status == 200


@pytest.mark.slow
async def test_jobs_survive_a_gateway_that_is_killed(run_folders):
    with up(KILLED) as run:
        async with aiohttp.ClientSession(run.url) as http:
            async with http.post(VIDEOS, json={"prompt": "a cat"}) as response:
                done = await finished(http, (await response.json())["id"])
            async with http.post(VIDEOS, json={"prompt": "50 ms", "num_inference_steps": 100}) as response:
                cut = await response.json()
        old = run.url
        run.kill("gateway#0")
        run.wait_for(lambda: [url for url in run.facts["gateways"] if url != old])
        async with aiohttp.ClientSession(next(url for url in run.facts["gateways"] if url != old)) as http:
            failed = await finished(http, cut["id"])
            assert (failed["status"], failed["error"]["code"]) == ("failed", "unavailable")
            assert "gateway" in failed["error"]["message"]
            assert await finished(http, done["id"]) == done
            async with http.get(f"{VIDEOS}/{done['id']}/content") as response:
                data = await response.read()
            assert len(frames(data)) == 16
            with av.open(io.BytesIO(data)) as container:
                assert 1.9 < sum(frame.samples for frame in container.decode(audio=0)) / 16_000 < 2.2
            run.wait_for(lambda: run.rows()["c#0"]["info"]["running"] == 0)  # and its work has ended


@pytest.mark.slow
async def test_a_hundred_jobs_deleted_at_any_point_leave_nothing(studio_serving, work_of):
    at_random = random.Random(0)

    async def made_and_deleted(http):
        async with http.post(VIDEOS, json={"prompt": "5 ms", "num_inference_steps": 20, "seconds": 4}) as response:
            job = await response.json()
        await asyncio.sleep(at_random.uniform(0, 0.3))  # any point of it
        async with http.delete(f"{VIDEOS}/{job['id']}") as response:
            assert response.status == 200

    def open_now():
        return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())

    async with studio_serving() as http:
        await asyncio.gather(*(made_and_deleted(http) for _ in range(10)))
        await work_of("camera", running=0)
        files, tasks = open_now()
        for _ in range(9):
            await asyncio.gather(*(made_and_deleted(http) for _ in range(10)))
        await work_of("camera", running=0)
        files_after, tasks_after = open_now()
        assert (files_after <= files + 2, tasks_after <= tasks + 2) == (True, True)
        async with http.get(VIDEOS) as response:
            assert [job for job in (await response.json())["data"] if job["prompt"] == "5 ms"] == []
