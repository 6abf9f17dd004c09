import asyncio

from penstock.client import connect


async def agent(task, trajectory):
    turn = await trajectory.turn()
    if task.metadata["answer"] not in turn.text:
        turn = await trajectory.turn("Look again: what is it?")
    return float(task.metadata["answer"] in turn.text)


async def main():
    async with connect("127.0.0.1:50051") as penstock:
        await penstock.work(agent, concurrency=32)


asyncio.run(main())
