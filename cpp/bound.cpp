#include "bound.h"

#include <algorithm>

#include "cut.h"

namespace rekindle {

Bound bound_at(const Problem& p, Id op, std::int64_t budget, Control& control) {
    Bound best;
    Moment moment(p, op);
    const std::int64_t room = budget - moment.own();
    if (room < 0) {
        best.infeasible = true;
        return best;
    }
    if (moment.total_size() <= static_cast<double>(room)) return best;  // everything fits

    // The bound is concave in the price; its slope is what is kept less the room.
    double low = 0;
    std::vector<double> keep_cost(p.size.size());
    double high = 2.0 * moment.total_cost() / std::max(1.0, static_cast<double>(room)) + 1e-12;
    for (int round = 0; round < 40 && !control.expired(); ++round) {
        const double price = round == 0 ? high : (low + high) / 2;
        for (std::size_t v = 0; v < keep_cost.size(); ++v)
            keep_cost[v] = price * static_cast<double>(p.size[v]);
        const double cut = moment.cut(keep_cost, control);
        if (control.expired()) break;
        std::vector<Id> kept = moment.kept();
        double kept_size = 0;
        for (Id v : kept) kept_size += static_cast<double>(p.size_of(v));
        if (cut - price * static_cast<double>(room) > best.extra) {
            best.extra = cut - price * static_cast<double>(room);
            best.price = price;
            best.kept = std::move(kept);
        }
        if (kept_size > static_cast<double>(room)) {
            low = price;
            if (round == 0) high *= 8;  // the price was still too low
            if (round == 0) round = -1;
            if (high > 1e30) break;
        } else {
            high = price;
        }
        if (high - low < 1e-4 * high) break;
    }
    best.extra = std::max(0.0, best.extra * (1 - 1e-9));
    return best;
}

}  // namespace rekindle
