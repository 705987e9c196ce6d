"""Writes reviews.csv, embedded Chinese texts: reviews of delivered meals, put together from parts.

Usage: python -m data.demo.make_reviews

A review has two or three remarks about the food, the delivery, the service or the price. Most
remarks agree with its class; about every seventh review has one that does not. No two are
equal. Running it again gives the same file, byte for byte.
"""

import csv
import random
from pathlib import Path

TARGET = Path(__file__).with_name("reviews.csv")
NUM_ROWS = 600
SEED = 25
MIXED = 7  # one review in so many has a remark of the other class
DISHES = (
    *("牛肉面", "宫保鸡丁", "麻辣烫", "黄焖鸡", "煎饺", "扬州炒饭", "酸辣粉", "烤鸭饭", "凉皮"),
    *("豆浆", "皮蛋瘦肉粥", "鱼香肉丝", "水煮鱼", "馄饨", "肉夹馍", "奶茶", "汉堡", "寿司"),
)
# Of each class: what is said of a dish, and what is said of all else.
OF_DISHES = {
    "好评": (
        *("味道很正宗", "分量很足", "还是热的", "特别香", "做得很干净", "口感很嫩", "又大又新鲜"),
        *("比店里吃的还好", "咸淡刚刚好", "孩子很爱吃"),
    ),
    "差评": (
        *("已经凉了", "咸得没法吃", "分量太少", "一股怪味", "没有煮熟", "里面有头发", "汤都洒了"),
        *("和图片完全不一样", "油太多了", "又硬又干"),
    ),
}
OF_ALL_ELSE = {
    "好评": (
        *("送餐很快", "包装很严实", "骑手很有礼貌", "老板送了小菜", "价格实惠", "半小时就到了"),
        *("客服回复及时", "下次还会点", "已经点了很多次", "推荐给同事了", "下雨天也准时送到"),
    ),
    "差评": (
        *("等了两个小时", "包装破了", "骑手态度很差", "餐具没给", "又涨价了", "打电话也不接"),
        *("送错了地址", "再也不点了", "要求退款没人理", "少送了一份", "备注根本不看"),
    ),
}
ENDS = ("。", "！", "", "～")


def review(label: str, draw: random.Random) -> str:
    """Return a review of one class."""
    other = next(name for name in OF_DISHES if name != label)
    said_of_dish = other if draw.randrange(MIXED) == 0 else label
    remarks = [draw.choice(DISHES) + draw.choice(OF_DISHES[said_of_dish])]
    remarks += draw.sample(OF_ALL_ELSE[label], draw.randint(1, 2))
    draw.shuffle(remarks)
    return "，".join(remarks) + draw.choice(ENDS)


def main() -> None:
    """Write the reviews, those of both classes in turns."""
    draw = random.Random(SEED)
    rows: dict[str, str] = {}  # class by text
    while len(rows) < NUM_ROWS:
        label = list(OF_DISHES)[len(rows) % len(OF_DISHES)]
        rows.setdefault(review(label, draw), label)
    with TARGET.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["label", "text"])
        writer.writerows((label, text) for text, label in rows.items())
    print(f"{TARGET}: {len(rows)} rows, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
